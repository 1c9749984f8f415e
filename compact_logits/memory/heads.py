"""The head that the compact one is compared with: a framework's, over the logits of every row."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["full_head"]


def full_head(
    hidden: Tensor,  # (rows, hidden)
    weight: Tensor,  # (vocab_local, hidden)
    targets: Tensor,  # (rows,) int64, of this slice
    *,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:  # log_probs (rows,), entropy (rows,)
    """Log-prob and entropy from the logits of every row, holding what RL trainers on Megatron hold.

    Logits in the model's dtype, an fp32 copy, a copy divided by the temperature where that is not 1, and a softmax kept
    for backward; the logits are kept too where the entropy has a gradient. So do slime's log-prob function and
    Megatron's `Float16Module` (read at slime 624b824a8). The vocabulary of one rank; collectives: none, their
    `(rows,)` results being small against `(rows, vocab_local)`.
    """
    logits = F.linear(hidden, weight).float()
    if temperature != 1.0:
        logits = logits / temperature
    return _SoftmaxKept.apply(logits, targets, entropy_gradient)


class _SoftmaxKept(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # (rows, vocab_local) fp32
        targets: Tensor,  # (rows,)
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        maximum = logits.amax(dim=1, keepdim=True)
        softmax = logits - maximum
        chosen = softmax.gather(1, targets[:, None]).squeeze(1)
        total = softmax.exp_().sum(dim=1, keepdim=True)
        softmax.div_(total)
        mean = torch.bmm(softmax[:, None, :], logits[:, :, None]).view(-1, 1)
        log_prob = chosen - total.log().squeeze(1)
        entropy = (maximum + total.log() - mean).squeeze(1)
        ctx.save_for_backward(softmax, targets, *([logits, mean] if entropy_gradient else []))
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, d_log_prob: Tensor, d_entropy: Tensor) -> tuple[Tensor, None, None]:
        softmax, targets, *of_entropy = ctx.saved_tensors
        d_logits = None
        if of_entropy:
            logits, mean = of_entropy
            d_logits = (mean - logits).mul_(softmax).mul_(d_entropy[:, None])
        grad = softmax.neg_()  # as trainers do: the kept softmax is spent, a second backward is not possible
        grad.scatter_add_(1, targets[:, None], torch.ones_like(targets, dtype=grad.dtype)[:, None])
        grad.mul_(d_log_prob[:, None])
        return grad if d_logits is None else grad.add_(d_logits), None, None
