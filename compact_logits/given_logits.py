"""The same scorers over logits that exist already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor

from compact_logits.chunks import Block, Scratch, plan_blocks, work_dtype
from compact_logits.first_order import first_order

if TYPE_CHECKING:
    from compact_logits.scorers.contract import Scorer

__all__ = ["rows_of", "score_logits"]


def rows_of(
    logits: Tensor,  # (..., vocab_local)
) -> Tensor:  # (rows, vocab_local) or (batch, rows, vocab_local)
    """One axis of rows, but two where the strides of the two let no view join them."""
    if logits.dim() == 3 and logits.shape[1] > 1 and logits.stride(0) != logits.shape[1] * logits.stride(1):
        return logits
    return rearrange(logits, "... vocab -> (...) vocab")


def score_logits(
    logits: Tensor,  # (rows, vocab_local) or (batch, rows, vocab_local), any strides
    scorer: Scorer,
    *,
    window: slice | Tensor = slice(None),  # a Tensor is (kept,) int64, distinct rows of 2-D logits
    overwrite: bool = False,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, ...]:  # the scorer's outputs, each (batch * rows of the window, ...)
    """Run `scorer` over the rows of `logits` in `window`, a block of rows at a time, without writing to them.

    `window` cuts the `rows` axis; the scorer's rows are those inside, batch by batch. Rows outside get zero gradient.

    Memory: two blocks of fp32 scratch; saved for backward are the logits themselves and O(rows) scalars; backward adds
    their gradient, in their dtype; with `overwrite` it puts the gradient where the logits are instead, which autograd
    then knows to be changed. Collectives: those of `scorer.merge`.
    """
    assert not overwrite or isinstance(window, Tensor) or window == slice(None)
    if torch.is_grad_enabled() and logits.requires_grad:
        return _ScoreLogits.apply(logits, scorer, window, overwrite, chunk_bytes)
    with torch.no_grad():
        return _forward(logits, scorer, window, chunk_bytes)[0]


class _ScoreLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, scorer: Scorer, window: slice | Tensor, overwrite: bool, chunk_bytes: int | None
    ) -> tuple[Tensor, ...]:
        outputs, saved = _forward(logits, scorer, window, chunk_bytes)
        ctx.save_for_backward(logits, *scorer.inputs, *saved)
        ctx.scorer, ctx.window, ctx.overwrite, ctx.chunk_bytes = scorer, window, overwrite, chunk_bytes
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[o for o, d in zip(outputs, scorer.differentiable, strict=True) if not d])
        return outputs

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, *rest = ctx.saved_tensors
        saved = rest[len(ctx.scorer.inputs) :]
        work = work_dtype(logits.dtype)
        grads = tuple(g if g is None else g.to(work) for g in grads)
        inside = _rows_inside(logits, ctx.window)
        plan = plan_blocks(inside, logits.shape[-1], logits.dtype, logits.device, ctx.chunk_bytes)
        scratch, columns = Scratch(plan, logits), logits.shape[-1]
        outside = _rows_inside(logits, slice(None)) - inside
        if ctx.overwrite:
            d_logits = logits.detach()
        else:
            d_logits = torch.zeros_like(logits) if outside else torch.empty_like(logits)
        blocks = zip(_blocks(logits, ctx.window, plan.block), _blocks(d_logits, ctx.window, plan.block), strict=True)
        for (given, block), (d_given, _) in blocks:
            rows = block.stop - block.start
            z = d_given if logits.dtype == work else scratch.block(rows, columns)
            spare = scratch.spare(rows, columns) if ctx.scorer.needs_spare else None
            ctx.scorer.d_logits_(
                Block(given, z, spare, block),
                tuple(tensor[block] for tensor in saved),
                tuple(g if g is None else g[block] for g in grads),
            )
            if logits.dtype != work:
                d_given.copy_(z)
            if isinstance(ctx.window, Tensor):
                d_logits.index_copy_(0, ctx.window[block], d_given)
        if ctx.overwrite and outside:
            dropped = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
            d_logits.masked_fill_(dropped.index_fill_(0, ctx.window, False)[:, None], 0.0)
        return d_logits, None, None, None, None


def _forward(
    logits: Tensor,  # (rows, vocab_local) or (batch, rows, vocab_local)
    scorer: Scorer,
    window: slice | Tensor,
    chunk_bytes: int | None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:  # outputs, saved
    inside = _rows_inside(logits, window)
    plan = plan_blocks(inside, logits.shape[-1], logits.dtype, logits.device, chunk_bytes)
    scratch, columns = Scratch(plan, logits), logits.shape[-1]
    stats = logits.new_empty(inside, scorer.stats_width, dtype=work_dtype(logits.dtype))
    for given, block in _blocks(logits, window, plan.block):
        rows = block.stop - block.start
        spare = scratch.spare(rows, columns) if scorer.needs_spare else None
        stats[block] = scorer.local_stats(Block(given, scratch.block(rows, columns), spare, block))
    return scorer.merge(stats)


def _rows_inside(logits: Tensor, window: slice | Tensor) -> int:
    if isinstance(window, Tensor):
        return window.shape[0]
    batch = logits.shape[0] if logits.dim() == 3 else 1
    return batch * len(range(logits.shape[-2])[window])


def _blocks(
    logits: Tensor,  # (rows, vocab_local) or (batch, rows, vocab_local)
    window: slice | Tensor,
    height: int,
) -> Iterator[tuple[Tensor, slice]]:
    """Blocks of at most `height` rows, and which of the scorer's rows each holds. Views where the window is a slice,
    since a window of a batch has no flat form: to reshape it would copy it; copies of single rows otherwise."""
    before = 0
    if isinstance(window, Tensor):
        for rows in window.split(height):
            yield logits.index_select(0, rows), slice(before, before + rows.shape[0])
            before += rows.shape[0]
        return
    for sequence in logits if logits.dim() == 3 else (logits,):
        for rows in sequence[window].split(height):
            if rows.shape[0]:
                yield rows, slice(before, before + rows.shape[0])
                before += rows.shape[0]
