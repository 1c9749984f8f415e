"""The same scorers over logits that exist already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from compact_logits.chunks import Scratch, plan_chunks, work_dtype

if TYPE_CHECKING:
    from compact_logits.scorers.contract import Scorer

__all__ = ["score_logits"]


def score_logits(
    logits: Tensor,  # (rows, vocab_local)
    scorer: Scorer,
    *,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, ...]:  # the scorer's outputs, each (rows, ...)
    """Run `scorer` over `logits`, a block of rows at a time, without writing to them.

    Memory: two blocks of fp32 scratch; saved for backward are the logits themselves and O(rows) scalars; backward adds
    their gradient, in their dtype. Collectives: those of `scorer.merge`.
    """
    if torch.is_grad_enabled() and logits.requires_grad:
        return _ScoreLogits.apply(logits, scorer, chunk_bytes)
    with torch.no_grad():
        return _forward(logits, scorer, chunk_bytes)[0]


class _ScoreLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, scorer: Scorer, chunk_bytes: int | None) -> tuple[Tensor, ...]:
        outputs, saved = _forward(logits, scorer, chunk_bytes)
        ctx.save_for_backward(logits, *saved)
        ctx.scorer, ctx.chunk_bytes = scorer, chunk_bytes
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[o for o, d in zip(outputs, scorer.differentiable, strict=True) if not d])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, *saved = ctx.saved_tensors
        work = work_dtype(logits.dtype)
        grads = tuple(g if g is None else g.to(work) for g in grads)
        plan = plan_chunks(logits.shape[0], logits.shape[1], logits.dtype, logits.device, ctx.chunk_bytes)
        scratch = Scratch(plan, logits.shape[1], logits)
        d_logits = torch.empty_like(logits)
        for _, block in plan.blocks(slice(0, plan.rows)):
            rows = block.stop - block.start
            z = d_logits[block] if logits.dtype == work else scratch.block(rows)
            z.copy_(logits[block])
            ctx.scorer.d_logits_(
                z,
                scratch.spare(rows) if ctx.scorer.needs_spare else None,
                block,
                tuple(tensor[block] for tensor in saved),
                tuple(g if g is None else g[block] for g in grads),
            )
            if logits.dtype != work:
                d_logits[block].copy_(z)
        return d_logits, None, None


def _forward(
    logits: Tensor,  # (rows, vocab_local)
    scorer: Scorer,
    chunk_bytes: int | None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:  # outputs, saved
    plan = plan_chunks(logits.shape[0], logits.shape[1], logits.dtype, logits.device, chunk_bytes)
    scratch = Scratch(plan, logits.shape[1], logits)
    stats = logits.new_empty(plan.rows, scorer.stats_width, dtype=work_dtype(logits.dtype))
    for _, block in plan.blocks(slice(0, plan.rows)):
        rows = block.stop - block.start
        z = scratch.block(rows).copy_(logits[block])
        stats[block] = scorer.local_stats(z, scratch.spare(rows) if scorer.needs_spare else None, block)
    return scorer.merge(stats)
