"""Setups in which the compact head is not proven. Each function returns the reason for the full path, or `None`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.config_logger import has_config_logger_enabled
from megatron.core.inference import utils as inference
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from compact_logits.megatron.request import Request

__all__ = ["refuse_call", "refuse_head", "refuse_model", "refuse_rows"]

_HOOKS_ON_OUTPUT = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


def _head_types() -> tuple[type, ...]:
    try:
        from megatron.core.transformer.linear_cross_entropy import LinearCrossEntropyModule
    except ImportError:  # only some versions have it
        return (ColumnParallelLinear,)
    return (ColumnParallelLinear, LinearCrossEntropyModule)


def refuse_model(
    model: Any,  # a GPTModel
) -> str | None:
    """Why this model may do something with the result of GPTModel's `_postprocess` that is meant for logits, or `None`.

    A subclass that caps or scales them would cap or scale log-probs. What a wrapper of the model does is not seen here.
    """
    for name in ("forward", "_postprocess", "_scale_logits"):
        if getattr(type(model), name, None) is not getattr(GPTModel, name, None):
            return f"{type(model).__name__} overrides GPTModel.{name}, and may expect logits there"
    if "forward" in vars(model):
        return "the model's forward is overridden on the instance"
    hooks = _hooks(model)
    return None if hooks is None else f"the model has {hooks}, which expect logits"


def _hooks(module: torch.nn.Module) -> str | None:
    """The kind of hooks that would meet the module's output, those on every module included. Pre-hooks do not."""
    everywhere = vars(torch.nn.modules.module)
    for kind in _HOOKS_ON_OUTPUT:
        if getattr(module, kind, None) or everywhere.get(f"_global{kind}"):
            return kind.strip("_").replace("_", " ")
    return None


def refuse_head(
    head: Any,  # the model's output layer
    weight: Tensor | None,  # the tied weight it is called with, if any
) -> str | None:
    """Why this output layer cannot be projected in slices, or `None`. Looks at types and flags, never at values."""
    if type(head) not in _head_types():
        return f"the output layer is a {type(head).__name__}, proven are plain ColumnParallelLinear heads"
    if "forward" in vars(head):
        return "the output layer's forward is overridden on the instance"
    hooks = _hooks(head)
    if hooks is not None:
        return f"the output layer has {hooks}, which expect logits"
    config = head.config
    flags = {
        "skip_bias_add": head.skip_bias_add,
        "gather_output": head.gather_output,
        "disable_grad_reduce": getattr(head, "disable_grad_reduce", False),
        "is_expert": getattr(head, "is_expert", False),
        "defer_embedding_wgrad_compute": config.defer_embedding_wgrad_compute,
        "weight sharding by remat groups (gtp_remat_size > 1)": getattr(head, "gtp_remat_size", 1) > 1,
        "an output dtype of its own": getattr(head, "output_dtype", None) is not None,
    }
    for name, is_set in flags.items():
        if is_set:
            return f"the output layer uses {name}"
    offloading = getattr(config, "_cpu_offloading_context", None)
    if offloading is not None and getattr(offloading, "inside_context", False):
        return "the output layer runs inside CPU offloading"
    return _refuse_weight(head, head.weight if weight is None else weight)


def _refuse_weight(head: Any, weight: Tensor | None) -> str | None:
    if weight is None:
        return "the output layer has no weight and was given none"
    if type(weight) not in (torch.nn.Parameter, Tensor):
        return f"the output weight is a {type(weight).__name__}, proven are plain tensors"
    if hasattr(weight, "__fsdp_param__"):
        return "the output weight belongs to Megatron-FSDP"
    if tuple(weight.shape) != (head.output_size_per_partition, head.input_size):
        return f"the output weight is {tuple(weight.shape)} at the time of the call, not the rank's whole slice"
    fused = head.gradient_accumulation_fusion and weight.requires_grad and torch.is_grad_enabled()
    if fused and getattr(weight, "main_grad", None) is None:
        return "gradient_accumulation_fusion is on but the output weight has no main_grad"
    return None


def refuse_call(
    model: Any,  # a GPTModel
    arguments: Mapping[str, Any],  # what its `_postprocess` was called with
    *,
    native: bool,  # whether the seam is the official output processor
) -> str | None:
    """Why this call of the model cannot take the compact path, or `None`. The same on every tensor-parallel rank."""
    config = model.config
    if arguments.get("labels") is not None:
        return "the model was called with labels and computes its own loss"
    if arguments.get("output_processor") is not None:
        return "the call has an output processor of its own"
    mode = getattr(inference, "InferenceMode", None)  # 0.18 and newer
    contexts = ("inference_context", "inference_params")
    if any(arguments.get(name) is not None for name in contexts) or (mode is not None and mode.is_active()):
        return "the model runs inference"
    if arguments.get("runtime_gather_output"):
        return "the caller asked for logits gathered over the vocabulary"
    if has_config_logger_enabled(config):
        return "the config logger dumps logits"
    if getattr(config, "batch_invariant_mode", False):
        return "batch-invariant mode fixes the order of operations of the full path"
    if getattr(config, "enable_autocast", False):
        return "the schedule runs the model under autocast"
    if _fp8_autocast():
        return "an fp8 autocast of Transformer Engine is on"
    if _full_iteration_graph(config) or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return "the whole iteration is captured in a CUDA graph, and the number of kept rows changes"
    scale = config.mup_output_mult if getattr(config, "use_mup", False) else 1.0
    if scale != 1.0 and not native:
        return "MuP scales the logits after the output layer, where this version has no output processor"
    if not scale > 0:
        return f"MuP multiplies the logits by {scale}, proven are positive scales"
    if config.mtp_num_layers and not native and "mtp_kwargs" not in arguments:
        return "multi-token prediction shares the output layer in a way not proven for this version"
    return None


def _fp8_autocast() -> bool:
    """Whether an fp8 autocast of Transformer Engine is active. Does not import Transformer Engine."""
    for name in ("transformer_engine.pytorch.fp8", "transformer_engine.pytorch.quantization"):
        manager = getattr(sys.modules.get(name), "FP8GlobalStateManager", None)
        if manager is not None and manager.is_fp8_enabled():
            return True
    return False


def _full_iteration_graph(config: Any) -> bool:
    scope = getattr(config, "cuda_graph_scope", None)
    scopes = scope if isinstance(scope, (list, tuple)) else [scope]
    names = {str(getattr(each, "name", each)) for each in scopes}
    return getattr(config, "cuda_graph_impl", None) == "full_iteration" or "full_iteration" in names


def refuse_rows(
    hidden: Tensor,  # (sequence / tensor-parallel size, batch, hidden)
    weight: Tensor,  # (vocab_local, hidden)
    request: Request,
    shards: int,
) -> str | None:
    """Why these hidden states are not the rows the request was built for, or `None`."""
    if hidden.dim() != 3 or hidden.shape[1] != request.batch:
        return f"the hidden states are {tuple(hidden.shape)}, and the request is for (rows, {request.batch}, hidden)"
    rows = hidden.shape[0] * hidden.shape[1] * shards
    if rows != request.selection.num_rows:
        return f"the model has {rows} rows and the loss mask was marked for {request.selection.num_rows}"
    if hidden.dtype != weight.dtype:
        return f"the hidden states are {hidden.dtype} and the output weight {weight.dtype}"
    if request.selection.indices.device != hidden.device:
        return f"the row selection is on {request.selection.indices.device}, the hidden states on {hidden.device}"
    kind = hidden.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return "autocast is on"
    return None
