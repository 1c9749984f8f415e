"""The same scorers over logits that exist already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from compact_logits.chunks import Scratch, plan_chunks, work_dtype

if TYPE_CHECKING:
    from compact_logits.scorers.contract import Scorer

__all__ = ["score_logits"]


def score_logits(
    logits: Tensor,  # (rows, vocab_local) or (batch, rows, vocab_local), any strides
    scorer: Scorer,
    *,
    window: slice = slice(None),
    chunk_bytes: int | None = None,
) -> tuple[Tensor, ...]:  # the scorer's outputs, each (batch * rows of the window, ...)
    """Run `scorer` over the rows of `logits` in `window`, a block of rows at a time, without writing to them.

    `window` cuts the `rows` axis; the scorer's rows are those inside, batch by batch. Rows outside get zero gradient.

    Memory: two blocks of fp32 scratch; saved for backward are the logits themselves and O(rows) scalars; backward adds
    their gradient, in their dtype. Collectives: those of `scorer.merge`.
    """
    if torch.is_grad_enabled() and logits.requires_grad:
        return _ScoreLogits.apply(logits, scorer, window, chunk_bytes)
    with torch.no_grad():
        return _forward(logits, scorer, window, chunk_bytes)[0]


class _ScoreLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, scorer: Scorer, window: slice, chunk_bytes: int | None) -> tuple[Tensor, ...]:
        outputs, saved = _forward(logits, scorer, window, chunk_bytes)
        ctx.save_for_backward(logits, *saved)
        ctx.scorer, ctx.window, ctx.chunk_bytes = scorer, window, chunk_bytes
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[o for o, d in zip(outputs, scorer.differentiable, strict=True) if not d])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, *saved = ctx.saved_tensors
        work = work_dtype(logits.dtype)
        grads = tuple(g if g is None else g.to(work) for g in grads)
        inside = _rows_inside(logits, ctx.window)
        plan = plan_chunks(inside, logits.shape[-1], logits.dtype, logits.device, ctx.chunk_bytes)
        scratch = Scratch(plan, logits.shape[-1], logits)
        outside = _rows_inside(logits, slice(None)) - inside
        d_logits = torch.zeros_like(logits) if outside else torch.empty_like(logits)
        blocks = zip(_blocks(logits, ctx.window, plan.block), _blocks(d_logits, ctx.window, plan.block), strict=True)
        for (given, block), (d_given, _) in blocks:
            rows = block.stop - block.start
            z = d_given if logits.dtype == work else scratch.block(rows)
            z.copy_(given)
            ctx.scorer.d_logits_(
                z,
                scratch.spare(rows) if ctx.scorer.needs_spare else None,
                block,
                tuple(tensor[block] for tensor in saved),
                tuple(g if g is None else g[block] for g in grads),
            )
            if logits.dtype != work:
                d_given.copy_(z)
        return d_logits, None, None, None


def _forward(
    logits: Tensor,  # (rows, vocab_local) or (batch, rows, vocab_local)
    scorer: Scorer,
    window: slice,
    chunk_bytes: int | None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:  # outputs, saved
    inside = _rows_inside(logits, window)
    plan = plan_chunks(inside, logits.shape[-1], logits.dtype, logits.device, chunk_bytes)
    scratch = Scratch(plan, logits.shape[-1], logits)
    stats = logits.new_empty(inside, scorer.stats_width, dtype=work_dtype(logits.dtype))
    for given, block in _blocks(logits, window, plan.block):
        rows = block.stop - block.start
        z = scratch.block(rows).copy_(given)
        stats[block] = scorer.local_stats(z, scratch.spare(rows) if scorer.needs_spare else None, block)
    return scorer.merge(stats)


def _rows_inside(logits: Tensor, window: slice) -> int:
    batch = logits.shape[0] if logits.dim() == 3 else 1
    return batch * len(range(logits.shape[-2])[window])


def _blocks(
    logits: Tensor,  # (rows, vocab_local) or (batch, rows, vocab_local)
    window: slice,
    height: int,
) -> Iterator[tuple[Tensor, slice]]:
    """Views of at most `height` rows, and which of the scorer's rows each holds. Views, since a window of a batch has
    no flat form: to reshape it would copy it."""
    before = 0
    for sequence in logits if logits.dim() == 3 else (logits,):
        for rows in sequence[window].split(height):
            if rows.shape[0]:
                yield rows, slice(before, before + rows.shape[0])
                before += rows.shape[0]
