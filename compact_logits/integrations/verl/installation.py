"""verl's three functions on the way to the vocab-parallel KL, its loss configuration and its engines, together."""

from __future__ import annotations

import importlib
import inspect

from compact_logits.config import Config
from compact_logits.errors import PatchError
from compact_logits.integrations.verl.refusals import batch_wrapper
from compact_logits.integrations.verl.request import (
    forward_kl_wrapper,
    topk_loss_wrapper,
    vocab_parallel_kl_wrapper,
)
from compact_logits.integrations.verl.tail_mode import TailMode, config_init_wrapper
from compact_logits.patching import Patch, PatchSet

__all__ = ["Installation"]

_KL_PARAMETERS = ["ctx", "vp_logits", "target_topk_logps", "target_topk_indices", "log_prob_min_clamp"]


class Installation:
    """The patches of one process and the tail-aware mode, both on or both off."""

    def __init__(self, config: Config) -> None:
        losses = importlib.import_module("verl.trainer.distillation.losses")
        megatron = importlib.import_module("verl.trainer.distillation.megatron.losses")
        workers = importlib.import_module("verl.workers.config")
        engines = importlib.import_module("verl.workers.engine.base")
        batches = importlib.import_module("verl.utils.tensordict_utils")
        kl = getattr(megatron, "_VocabParallelKLDivergence", None)
        if kl is None or list(inspect.signature(kl.forward).parameters) != _KL_PARAMETERS:
            raise PatchError(
                f"needed _VocabParallelKLDivergence.forward({', '.join(_KL_PARAMETERS)}) in {megatron.__name__}; this "
                f"version of verl is not supported"
            )
        of_batch = batches.get_non_tensor_data
        self.tail_mode = TailMode(losses)
        self.patches = PatchSet(
            Patch(
                losses,
                "compute_topk_loss",
                topk_loss_wrapper,
                requires=("config", "distillation_config", "data", "student_logits", "data_format"),
            ),
            Patch(
                megatron,
                "compute_forward_kl_topk",
                lambda original: forward_kl_wrapper(original, megatron, losses.no_padding_2_padding),
                requires=("student_logits", "teacher_topk_log_probs", "teacher_topk_ids", "config", "data_format"),
            ),
            Patch(kl, "apply", vocab_parallel_kl_wrapper(config)),
            Patch(workers.DistillationLossConfig, "__init__", config_init_wrapper),
            Patch(
                engines.BaseEngine,
                "train_batch",
                lambda original: batch_wrapper(original, of_batch),
                requires=("data", "loss_function"),
            ),
            Patch(
                engines.BaseEngine,
                "infer_batch",
                lambda original: batch_wrapper(original, of_batch),
                requires=("data", "loss_function"),
            ),
        )

    def apply(self) -> None:
        self.patches.apply()
        self.tail_mode.register()

    def revert(self) -> None:
        self.patches.revert()
        self.tail_mode.unregister()
