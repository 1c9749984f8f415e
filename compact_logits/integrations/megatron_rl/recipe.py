"""Which runs and models keep the gathered path, each by name."""

from __future__ import annotations

import inspect
import sys
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.inference import utils as inference
from megatron.core.models.gpt import GPTModel

from compact_logits.megatron.output_processor import PROCESSOR_PARAMETERS
from compact_logits.megatron.refusals import refuse_call, refuse_head

__all__ = ["Refusal", "inner_gpt", "refusals"]


@dataclass(frozen=True)
class Refusal:
    """Why a setup keeps the gathered path, and what would change that."""

    reason: str
    remedy: str


def inner_gpt(model: Any) -> GPTModel | None:
    """The GPTModel inside Megatron's own wrappers (DDP, mixed precision), if it is one and in nothing else."""
    while not isinstance(model, GPTModel):
        model = getattr(model, "module", None)
        if model is None:
            return None
    return model


def refusals(model: Any, args: Namespace) -> list[Refusal]:
    """Every reason why this rank cannot take log-probs of `model` on the compact path; empty where it can.

    Looks at arguments, types and flags alone, never at the pass (gradients, training or evaluation mode) or at
    values: old, reference and current log-probs decide alike, and so do all ranks of a tensor-parallel group.
    """
    return [*_of_run(args), *_of_model(model)]


def _of_run(args: Namespace) -> list[Refusal]:
    said = vars(args)
    scope = said.get("cuda_graph_scope") or ()
    names = {str(getattr(each, "name", each)) for each in (scope if isinstance(scope, (list, tuple)) else [scope])}
    flags = [
        (
            said.get("cuda_graph_impl") == "full_iteration" or "full_iteration" in names,
            "--cuda-graph-impl full_iteration replays one row count for all micro-batches",
            "capture layers (local or transformer_engine)",
        ),
        (
            said.get("batch_invariant_mode") or _batch_invariant(),
            "--batch-invariant-mode fixes the order of the gathered log-softmax's operations",
            "remove the flag",
        ),
        (
            said.get("hybrid_layer_pattern") is not None,
            "--hybrid-layer-pattern makes a HybridModel, which has no output-processor contract",
            "use a GPTModel",
        ),
        (
            said.get("gtp_weight_remat_size", 1) > 1,
            "GTP (--tensor-parallel-num-weight-shards) leaves each rank a part of its slice of the output weight",
            "remove the flag",
        ),
        (
            any(said.get(flag) for flag in ("use_megatron_fsdp", "use_torch_fsdp2", "use_custom_fsdp")),
            "FSDP gathers the output weight by module hooks this is not proven with",
            "use the distributed optimizer",
        ),
        (said.get("fp8_output_proj"), "--fp8-output-proj runs the output layer in fp8", "remove the flag"),
        (said.get("config_logger_dir"), "the config logger (--config-logger-dir) dumps logits", "remove the flag"),
        (
            said.get("rl_verify_model_weights_swap"),
            "--rl-verify-model-weights-swap compares logits",
            "remove the flag once the swap is verified",
        ),
        (said.get("label_smoothing"), "--label-smoothing reads every column of the logits", "set it to 0"),
        (
            said.get("mtp_num_layers"),
            "--mtp-num-layers: multi-token prediction gathers the logits of its own heads",
            "train without it",
        ),
    ]
    return [Refusal(reason, remedy) for is_set, reason, remedy in flags if is_set]


def _of_model(model: Any) -> list[Refusal]:
    inner = inner_gpt(model)
    if inner is None:
        return [Refusal(f"the model is a {_innermost(model)}, proven is megatron-core's GPTModel", "use a GPTModel")]
    for function in (type(inner).forward, type(inner)._postprocess):
        missing = [name for name in PROCESSOR_PARAMETERS if name not in inspect.signature(function).parameters]
        if missing:
            lacks = f"{function.__qualname__} has no {missing[0]}: this version has no output-processor contract"
            return [Refusal(lacks, "use megatron-core 0.18 or newer")]
    mode = getattr(inference, "InferenceMode", None)  # 0.18 and newer
    if mode is not None and mode.is_active():
        return [Refusal("an inference engine is using the model", "take log-probs after it has finished")]
    if not inner.post_process:
        return []
    if inner.config.mtp_num_layers:
        return [Refusal("multi-token prediction gathers the logits of the model's further heads", "train without it")]
    tied = inner.shared_embedding_or_output_weight() if inner.share_embeddings_and_output_weights else None
    with torch.enable_grad():  # so that a no-grad pass is refused wherever the training pass will be
        reason = refuse_call(inner, {}, native=True) or refuse_head(inner.output_layer, tied)
    return [] if reason is None else [Refusal(reason, "change that, or leave the gathered path to it")]


def _batch_invariant() -> bool:
    """Whether the mode is on. Its module needs Triton, so it is read only if something else has imported it."""
    kernels = sys.modules.get("megatron.core.transformer.custom_layers.batch_invariant_kernels")
    return kernels is not None and bool(kernels.is_batch_invariant_mode_enabled())


def _innermost(model: Any) -> str:
    while getattr(model, "module", None) is not None:
        model = model.module
    return type(model).__name__
