"""The kernels in plain torch: their definition, and what runs where Triton does not. No operation waits for a device.

Each walks over blocks of rows, since it holds a block in fp32: on a CPU one that stays in cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compact_logits.engine.kernels.row_stats import LEAST_EXPONENT, combine_stats

__all__ = ["row_stats_", "softmax_grad_", "write_at_"]

_CPU_BLOCK, _GPU_BLOCK = 4 * 2**20, 64 * 2**20  # bytes, in fp32


def row_stats_(stats: Tensor, logits: Tensor, inverse_temperature: Tensor, moment: bool, squares: bool) -> None:
    for rows in _blocks(logits):
        z = logits[rows] * inverse_temperature[rows, None]  # fp32
        maximum = z.amax(dim=1)
        z.sub_(maximum.masked_fill(maximum == -torch.inf, 0.0)[:, None])
        exp = z.exp() if moment else z.exp_()
        # Summed in fp64: where one id has nearly all probability, the sum's rounding is all the entropy's error.
        columns = [maximum.double(), exp.sum(dim=1, dtype=torch.float64)]
        if moment:
            columns.append(z.clamp_(min=LEAST_EXPONENT).mul_(exp).sum(dim=1, dtype=torch.float64))
        if squares:
            columns.append(exp.square_().sum(dim=1, dtype=torch.float64))
        both = torch.stack([stats[rows], torch.stack(columns, dim=1)])
        stats[rows] = combine_stats(both, moment=moment, squares=squares)


def softmax_grad_(
    logits: Tensor, inverse_temperature: Tensor, shift: Tensor, scale: Tensor, slope: Tensor | None
) -> None:
    for rows in _blocks(logits):
        block = logits[rows]
        z = block if block.dtype == shift.dtype else block.to(shift.dtype)
        z.mul_(inverse_temperature[rows, None]).sub_(shift[rows, None])
        factor = scale[rows, None]
        if slope is not None:
            factor = z.clamp(min=LEAST_EXPONENT).mul_(slope[rows, None]).add_(factor)
        z.exp_().mul_(factor)
        if z is not block:
            block.copy_(z)


def write_at_(logits: Tensor, ids: Tensor, values: Tensor, first: int) -> None:
    last = logits.shape[1] - 1
    columns = ids - first
    owned = (columns >= 0) & (columns <= last)
    # An id of another slice repeats what the row's first owned one writes. Where a row owns none, it writes what stands
    # there already.
    one = owned.byte().argmax(dim=1, keepdim=True)
    spare = columns.gather(1, one).clamp(0, last)
    known = torch.where(owned.any(dim=1, keepdim=True), values.to(logits.dtype).gather(1, one), logits.gather(1, spare))
    logits.scatter_(1, torch.where(owned, columns, spare), torch.where(owned, values.to(logits.dtype), known))


def _blocks(logits: Tensor) -> Iterator[slice]:
    rows, columns = logits.shape
    height = max((_CPU_BLOCK if logits.is_cpu else _GPU_BLOCK) // (4 * columns), 1)
    return (slice(start, start + height) for start in range(0, rows, height))
