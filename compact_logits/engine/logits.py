"""The same scorers over logits that exist already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from compact_logits.engine.slices import default_budget

if TYPE_CHECKING:
    from compact_logits.engine.scorer import Scorer

__all__ = ["rows_of", "score_logits"]


def rows_of(
    logits: Tensor,  # (..., vocab_local)
) -> Tensor:  # (rows, vocab_local) or (batch, rows, vocab_local)
    """Join the leading axes to one axis of rows, but leave 3-D logits alone if their strides do not allow a view."""
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
    """Run `scorer` over the rows of `logits` in `window`, without writing to them.

    `window` selects from the `rows` axis; the scorer's rows are the selected ones, batch by batch. Other rows get zero
    gradient.

    Memory: saved for backward are the logits themselves and O(rows) scalars. Backward allocates the gradient, in the
    logits' dtype. With `overwrite` it writes the gradient over the logits, and autograd sees that change.
    Rows that must be copied (a Tensor as window, a scorer that writes to logits, columns that are not adjacent) are
    copied `chunk_bytes` at a time. Collectives: those of `scorer.merge`.
    """
    assert not overwrite or isinstance(window, Tensor) or window == slice(None)
    return _ScoreLogits.apply(logits, scorer, window, overwrite, chunk_bytes)


class _ScoreLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, scorer: Scorer, window: slice | Tensor, overwrite: bool, chunk_bytes: int | None
    ) -> tuple[Tensor, ...]:
        parts, counted = [], scorer.shard.size
        copied = not isinstance(window, Tensor) and (scorer.writes_logits or logits.stride(-1) != 1)
        for given, rows in _blocks(logits, window, chunk_bytes, copied=copied):
            part = scorer.of_rows(rows)
            block = given.clone(memory_format=torch.contiguous_format) if copied else given
            parts.append(part.new_stats())
            part.add_slice_(parts[-1], block[:, :counted], scorer.shard.start)
        parts = parts or [scorer.new_stats()]
        outputs, saved = scorer.merge(tuple(torch.cat(each) for each in zip(*parts, strict=True)))
        ctx.save_for_backward(logits, *scorer.inputs, *saved)
        ctx.scorer, ctx.window, ctx.overwrite, ctx.chunk_bytes = scorer, window, overwrite, chunk_bytes
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[o for o, d in zip(outputs, scorer.differentiable, strict=True) if not d])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, *rest = ctx.saved_tensors
        scorer, window = ctx.scorer, ctx.window
        grad, counted = scorer.logits_grad(tuple(rest[len(scorer.inputs) :]), grads), scorer.shard.size
        copied = isinstance(window, Tensor)  # then blocks are copies, written back by index
        if ctx.overwrite:
            d_logits = logits.detach()
        elif copied:
            d_logits = torch.zeros_like(logits, memory_format=torch.contiguous_format)
        else:
            d_logits = logits.detach().clone(memory_format=torch.contiguous_format)
            first, last, _ = window.indices(logits.shape[-2])
            d_logits[..., :first, :] = d_logits[..., last:, :] = 0.0
        for block, rows in _blocks(logits if copied else d_logits, window, ctx.chunk_bytes):
            grad.of_rows(rows).write_(block[:, :counted], scorer.shard.start)
            block[:, counted:] = 0.0
            if copied:
                d_logits.index_copy_(0, window[rows], block)
        if ctx.overwrite and copied:
            dropped = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
            d_logits.masked_fill_(dropped.index_fill_(0, window, False)[:, None], 0.0)
        return d_logits, None, None, None, None


def _blocks(
    logits: Tensor,  # (rows, vocab_local) or (batch, rows, vocab_local)
    window: slice | Tensor,
    chunk_bytes: int | None,
    *,
    copied: bool = False,  # whether the caller copies each block
) -> Iterator[tuple[Tensor, slice]]:
    """Blocks of rows, and which of the scorer's rows each holds.

    For a slice as window, blocks are views, and each is within one sequence of a batch. For a Tensor they are copies.
    A block that is copied, here or by the caller, takes `chunk_bytes` at most, or one row.
    """
    budget = default_budget(logits.device) if chunk_bytes is None else chunk_bytes
    height = max(budget // max(logits.shape[-1] * logits.element_size(), 1), 1)
    before = 0
    if isinstance(window, Tensor):
        for rows in window.split(height):
            yield logits.index_select(0, rows), slice(before, before + rows.shape[0])
            before += rows.shape[0]
        return
    for sequence in logits if logits.dim() == 3 else (logits,):
        inside = sequence[window]
        for block in inside.split(height if copied else max(inside.shape[0], 1)):
            if block.shape[0]:
                yield block, slice(before, before + block.shape[0])
                before += block.shape[0]
