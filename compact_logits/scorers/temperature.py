"""The division of logits by the sampler's temperature, one for all rows or one a row."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["inverse_temperature", "tempered"]


def tempered(
    logits: Tensor,  # (block, vocab_local), read only unless it is `z`
    z: Tensor,  # (block, vocab_local) scratch in the working dtype
    temperature: float | Tensor,  # scalar or (rows,)
    rows: slice,  # which rows the block holds
) -> Tensor:  # (block, vocab_local)
    """The logits by the temperature: `z`, or `logits` as they are where there is nothing to do."""
    if not isinstance(temperature, Tensor) and temperature == 1.0:
        # Where the passes that follow read one dtype and write another, a CPU is slower than it is with a copy first.
        return z.copy_(logits) if logits.dtype != z.dtype and z.device.type == "cpu" else logits
    divisor = temperature[rows].to(z.dtype)[:, None] if isinstance(temperature, Tensor) else temperature
    return torch.div(logits, divisor, out=z) if logits.dtype == z.dtype else z.copy_(logits).div_(divisor)


def inverse_temperature(
    temperature: float | Tensor,  # scalar or (rows,)
    rows: slice,
    like: Tensor,  # (block,)
) -> Tensor:  # (block,)
    """`d (z / T) / dz` of each row."""
    if isinstance(temperature, Tensor):
        return temperature[rows].to(like.dtype).reciprocal()
    return torch.full_like(like, 1.0 / temperature)
