"""The patches of slime's functions and of the model, and the decision whether a run takes the compact path."""

from __future__ import annotations

import importlib
import inspect
import logging
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from compact_logits.config import Config
from compact_logits.errors import PatchError, RefusedError
from compact_logits.integrations.slime.advantages import advantages_wrapper
from compact_logits.integrations.slime.batch import CheckedIterator, mark_batch
from compact_logits.integrations.slime.consumer import log_probs_wrapper
from compact_logits.integrations.slime.passes import Pass, current_pass, of_forward_only, of_training, running
from compact_logits.integrations.slime.recipe import Refusal, refusals
from compact_logits.integrations.slime.step import step_wrapper
from compact_logits.megatron import HeadMetrics
from compact_logits.megatron.postprocess import NEEDED_PARAMETERS, postprocess_wrapper
from compact_logits.patching import Patch, PatchSet

__all__ = ["Installation"]

logger = logging.getLogger("compact_logits")


class Installation:
    """The patches of one process. `refused` is `None` until the run's arguments have been seen."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.refused: list[Refusal] | None = None
        self.metrics = HeadMetrics()
        model = importlib.import_module("slime.backends.megatron_utils.model")
        data = importlib.import_module("slime.backends.megatron_utils.data")
        loss = importlib.import_module("slime.backends.megatron_utils.loss")
        cp_utils = importlib.import_module("slime.backends.megatron_utils.cp_utils")
        redistribute = _used(loss, "_allgather_cp_redistribute")
        self._cut = _used(cp_utils, "slice_log_prob_with_cp")
        self._megatron_args: Callable[[], Namespace] = model.get_args
        self._log_probs = Patch(
            loss,
            "get_log_probs_and_entropy",
            lambda original: log_probs_wrapper(original, redistribute, self.metrics),
            requires=("logits", "args", "unconcat_tokens", "total_lengths", "response_lengths", "with_entropy"),
        )
        self._original_log_probs = loss.get_log_probs_and_entropy
        self.patches = PatchSet(
            Patch(GPTModel, "_postprocess", self._seam, requires=NEEDED_PARAMETERS),
            Patch(data, "get_batch", self._get_batch, requires=("data_iterator", "keys", "allgather_cp")),
            Patch(model, "forward_only", self._forward_only, requires=("f", "args", "use_rollout_top_p_replay")),
            Patch(model, "train", self._train, requires=("rollout_id", "model")),
            Patch(loss, "compute_advantages_and_returns", self._advantages, requires=("args", "rollout_data")),
            Patch(model, "train_one_step", self._step, requires=("step_id", "model")),
            self._log_probs,
        )

    def decide(self, args: Namespace) -> bool:
        """Whether the run that `args` describes takes the compact path. The first call decides for all passes.

        Raises `RefusedError` in strict mode where it is not.
        """
        if self.refused is None:
            found = refusals(args)
            strict = self.config.mode == "strict"
            self.refused = [refusal for refusal in found if strict or not refusal.metric_only]
            for refusal in found:
                if refusal in self.refused:
                    logger.warning("full path for the whole run: %s; %s", refusal, refusal.remedy)
                else:
                    logger.warning("compact path, with another value of one metric: %s", refusal)
        if self.refused and self.config.mode == "strict":
            reasons = "; ".join(f"{refusal} ({refusal.remedy})" for refusal in self.refused)
            raise RefusedError(f"COMPACT_LOGITS=strict: {reasons}")
        return not self.refused

    def _seam(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return postprocess_wrapper(original, self.metrics)

    def _advantages(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return advantages_wrapper(original, self._cut, self.decide)

    def _step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return step_wrapper(original, self.metrics)

    def _train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def train(*args: Any, **kwargs: Any) -> Any:
            run = self._megatron_args()
            with running(of_training(run) if self.decide(run) else None):
                return original(*args, **kwargs)

        return train

    def _forward_only(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def forward_only(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            known = (self._original_log_probs, self._log_probs.wrapper)
            replay = bool(given.get("use_rollout_top_p_replay", False))
            run = given["args"]
            with running(of_forward_only(run, given["f"], known, replay=replay) if self.decide(run) else None):
                return original(*args, **kwargs)

        return forward_only

    def _get_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_batch(
            data_iterator: Any, keys: Any, pad_multiplier: int = 128, allgather_cp: bool = False
        ) -> dict[str, Any]:
            pass_: Pass | None = current_pass()
            if pass_ is None:
                return original(data_iterator, keys, pad_multiplier, allgather_cp)
            batch: dict[str, Any] = original(CheckedIterator(data_iterator), keys, pad_multiplier, allgather_cp)
            if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
                mark_batch(
                    batch,
                    pass_,
                    self.config,
                    allgather_cp=allgather_cp,
                    cp_rank=parallel_state.get_context_parallel_rank(),
                    cp_size=parallel_state.get_context_parallel_world_size(),
                    cp_group=parallel_state.get_context_parallel_group(check_initialized=False),
                )
            return batch

        return get_batch


def _used(module: ModuleType, name: str) -> Any:
    """A function of slime's that is called and not replaced."""
    found = getattr(module, name, None)
    if found is None:
        raise PatchError(f"{module.__name__} has no {name}; this slime version is not supported")
    return found
