"""The logits of a chunk turned into their gradient, where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compact_logits.chunk_product import narrowed
from compact_logits.chunks import Block, ChunkPlan, Scratch, work_dtype

if TYPE_CHECKING:
    from compact_logits.scorers.contract import Scorer

__all__ = ["turned"]


def turned(
    logits: Tensor,  # (rows, columns)
    dtype: torch.dtype,  # of the hidden states
    part: Scorer,
    plan: ChunkPlan,
    scratch: Scratch,
    first: int,  # row of all rows
    saved: list[Tensor],  # (all rows, ...) each
    grads: tuple[Tensor | None, ...],  # (all rows,) each
    d_bias: Tensor | None,  # (columns,), added to
    largest: Tensor | None,  # (rows,) fp32, where forward has turned the logits into shares shifted by it
    *,
    stayed: bool,  # in memory since then; formed again otherwise
) -> Tensor:  # (rows, columns) of `dtype`
    """A chunk's logits turned into their gradient, in the same memory."""
    d_logits = narrowed(logits, dtype)
    in_place = dtype == work_dtype(dtype)
    for local in plan.blocks(logits.shape[0]):
        block = slice(first + local.start, first + local.stop)
        size = (local.stop - local.start, logits.shape[1])
        z = d_logits[local] if in_place else scratch.block(*size)
        spare = scratch.spare(*size) if part.needs_spare else None
        given = Block(z if in_place else logits[local], z, spare, block)
        of_block = tuple(tensor[block] for tensor in saved), tuple(g if g is None else g[block] for g in grads)
        if largest is None:
            part.d_logits_(given, *of_block)
        else:
            assert part.turn_shares_ is not None
            if not stayed:  # as in forward: a second backward has the bits of the first
                part.local_stats(given)
            part.turn_shares_(z, largest[local], block, *of_block)
        if d_bias is not None:
            d_bias += z.sum(dim=0)
        if not in_place:
            d_logits[local].copy_(z)
    return d_logits
