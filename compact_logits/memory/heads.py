"""The heads that the compact one is compared with: the frameworks' own, over the logits of every row."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["full_head", "full_topk_head"]


def full_head(
    hidden: Tensor,  # (rows, hidden)
    weight: Tensor,  # (vocab_local, hidden)
    targets: Tensor,  # (rows,) int64, of this slice
    *,
    temperature: float,
    entropy_gradient: bool,
    with_entropy: bool = True,
    keep: Tensor | None = None,  # (rows, vocab_local) bool, the top-p mask
) -> tuple[Tensor, Tensor]:  # log_probs (rows,), entropy (rows,)
    """Log-prob and entropy from the logits of every row, holding what RL trainers on Megatron hold.

    Logits in the model's dtype, an fp32 copy, a copy divided by the temperature where that is not 1, and a softmax kept
    for backward; the logits are kept too where the entropy has a gradient. With a top-p mask, log-probs have their own
    softmax, over a masked copy. So do slime's log-prob function and Megatron's `Float16Module` (read at slime
    624b824a8). The vocabulary of one rank; collectives: none, their `(rows,)` results being small against
    `(rows, vocab_local)`.
    """
    logits = F.linear(hidden, weight).float()
    if temperature != 1.0:
        logits = logits / temperature
    return _SoftmaxKept.apply(logits, targets, keep, with_entropy, entropy_gradient)


def full_topk_head(
    hidden: Tensor,  # (rows, hidden)
    weight: Tensor,  # (vocab_local, hidden)
    teacher_log_probs: Tensor,  # (rows, k) fp32
    teacher_ids: Tensor,  # (rows, k) int64, of this slice
    *,
    temperature: float,
) -> Tensor:  # (rows,)
    """Truncated top-k forward KL from the logits of every row, holding what verl's vocabulary-parallel one holds.

    Besides the fp32 logits: the shifted ones, their exponentials and the log-softmax at once, then log-softmax and
    softmax, of which the softmax is kept for backward (read at verl's `trainer/distillation/megatron/losses.py`).
    """
    logits = F.linear(hidden, weight).float()
    if temperature != 1.0:
        logits = logits / temperature
    return _TopKSoftmaxKept.apply(logits, teacher_log_probs, teacher_ids)


class _SoftmaxKept(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # (rows, vocab_local) fp32
        targets: Tensor,  # (rows,)
        keep: Tensor | None,  # (rows, vocab_local) bool
        with_entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        entropy = softmax = mean = logits.new_zeros(0)
        if with_entropy or keep is None:
            softmax, chosen, maximum, total = _softmax(logits, targets)
        if with_entropy:
            mean = torch.bmm(softmax[:, None, :], logits[:, :, None]).view(-1, 1)
            entropy = (maximum + total.log() - mean).squeeze(1)
        of_mask = softmax
        if keep is not None:
            of_mask, chosen, _, total = _softmax(logits.masked_fill(~keep, -torch.inf), targets, reuse=True)
        log_prob = chosen - total.log().squeeze(1)
        ctx.save_for_backward(of_mask, targets, *([softmax, logits, mean] if entropy_gradient else []))
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_log_prob: Tensor, d_entropy: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, targets, *of_entropy = ctx.saved_tensors
        d_logits = None
        if of_entropy:
            whole, logits, mean = of_entropy
            d_logits = (mean - logits).mul_(whole).mul_(d_entropy[:, None])
        grad = softmax.neg_()  # as trainers do: the kept softmax is spent, a second backward is not possible
        grad.scatter_add_(1, targets[:, None], torch.ones_like(targets, dtype=grad.dtype)[:, None])
        grad.mul_(d_log_prob[:, None])
        return grad if d_logits is None else grad.add_(d_logits), None, None, None, None


def _softmax(
    logits: Tensor,  # (rows, vocab_local)
    targets: Tensor,  # (rows,)
    *,
    reuse: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # softmax, shifted logit of the target (rows,), maximum, total (rows, 1)
    """In one buffer, which is that of `logits` where they are spent."""
    maximum = logits.amax(dim=1, keepdim=True)
    softmax = logits.sub_(maximum) if reuse else logits - maximum
    chosen = softmax.gather(1, targets[:, None]).squeeze(1)
    total = softmax.exp_().sum(dim=1, keepdim=True)
    return softmax.div_(total), chosen, maximum, total


class _TopKSoftmaxKept(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # (rows, vocab_local) fp32
        teacher_log_probs: Tensor,  # (rows, k)
        teacher_ids: Tensor,  # (rows, k)
    ) -> Tensor:
        log_softmax = _log_softmax(logits)
        softmax = log_softmax.exp()
        q = teacher_log_probs.exp()
        ctx.save_for_backward(softmax, q, teacher_ids)
        return (q * (teacher_log_probs - log_softmax.gather(1, teacher_ids))).sum(dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, None, None]:
        softmax, q, teacher_ids = ctx.saved_tensors
        grad = softmax * q.sum(dim=1, keepdim=True)
        grad.scatter_add_(1, teacher_ids, -q)
        return grad.mul_(d_loss[:, None]), None, None


def _log_softmax(
    logits: Tensor,  # (rows, vocab_local)
) -> Tensor:  # (rows, vocab_local)
    shifted = logits - logits.amax(dim=1, keepdim=True)
    exponentials = shifted.exp()
    return shifted - exponentials.sum(dim=1, keepdim=True).log()
