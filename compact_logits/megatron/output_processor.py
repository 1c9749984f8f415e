"""The output processor for Megatron's official contract: it calls the output layer with a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from einops import rearrange
from torch import Tensor

from compact_logits.megatron.output_layer import compact_output_layer
from compact_logits.megatron.request import Request

__all__ = ["PROCESSOR_PARAMETERS", "output_processor"]

PROCESSOR_PARAMETERS = ("output_processor", "output_processor_context")


def output_processor(
    *,
    hidden_states: Tensor,  # (sequence / tensor-parallel size, batch, hidden)
    output_layer: Any,
    output_weight: Tensor | None,
    runtime_gather_output: bool | None,
    context: tuple[Any, Request],  # the GPTModel and its request
    scale_logits: Callable[[Tensor], Tensor],
    **_: Any,
) -> Tensor:  # (batch, sequence, 2 or 3) fp32, or the ordinary logits
    """Log-prob and entropy of every row, whether the caller wants logits gathered over the vocabulary or not.

    If the head refuses the rows, it computes logits, gathered if the caller wants that. `Request.outcome` says which.
    """
    model, request = context
    scale = model.config.mup_output_mult if getattr(model.config, "use_mup", False) else 1.0
    with compact_output_layer(output_layer, request, logit_scale=scale):
        output, _bias = output_layer(hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output)
    if not request.compact:
        output = scale_logits(output)
    return rearrange(output, "row batch scalar -> batch row scalar").contiguous()
