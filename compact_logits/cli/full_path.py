"""What a trainer does without this package: log-prob and entropy of every row, from logits of every row."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["dense_log_probs"]


def dense_log_probs(
    logits: Tensor,  # (rows, vocab_local)
    targets: Tensor,  # (rows) int64, global ids
    *,
    group: dist.ProcessGroup,
    temperature: float,
) -> tuple[Tensor, Tensor]:  # log_probs (rows), entropy (rows)
    """The vocabulary-parallel form of `compact_logits.reference.log_probs`, in fp32 and differentiable.

    The vocabulary is cut evenly over `group`, in order of rank. Forward four all-reduces, backward none: every rank
    computes the same loss, so the gradient of a sum over ranks is the gradient of each summand.
    """
    z = logits.float() / temperature
    maximum = z.detach().amax(dim=-1)
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    shifted = z - rearrange(maximum, "rows -> rows 1")
    exponentials = shifted.exp()
    total = _SumOverRanks.apply(exponentials.sum(dim=-1), group)
    moment = _SumOverRanks.apply((exponentials * shifted).sum(dim=-1), group)
    local = targets - group.rank() * logits.shape[1]
    owned = (local >= 0) & (local < logits.shape[1])
    place = rearrange(local.clamp(0, logits.shape[1] - 1), "rows -> rows 1")
    chosen = rearrange(shifted.gather(1, place), "rows 1 -> rows")
    target_logit = _SumOverRanks.apply(torch.where(owned, chosen, 0.0), group)
    return target_logit - total.log(), total.log() - moment / total


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (rows)
        group: dist.ProcessGroup,
    ) -> Tensor:  # (rows)
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
