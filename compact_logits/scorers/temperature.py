"""The division of logits by the sampler's temperature, one for all rows or one a row."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["inverse_temperature", "temper_"]


def temper_(
    z: Tensor,  # (block, vocab_local), overwritten
    temperature: float | Tensor,  # scalar or (rows,)
    rows: slice,  # which rows the block holds
) -> None:
    if isinstance(temperature, Tensor):
        z.div_(temperature[rows].to(z.dtype)[:, None])
    elif temperature != 1.0:
        z.div_(temperature)


def inverse_temperature(
    temperature: float | Tensor,  # scalar or (rows,)
    rows: slice,
    like: Tensor,  # (block,)
) -> Tensor:  # (block,)
    """`d (z / T) / dz` of each row."""
    if isinstance(temperature, Tensor):
        return temperature[rows].to(like.dtype).reciprocal()
    return torch.full_like(like, 1.0 / temperature)
