"""The definition, in plain dense torch: what every fast function equals. Tests and the roof use it, production never."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["log_probs"]


def log_probs(
    logits: Tensor,  # (rows, vocab), the whole vocabulary
    targets: Tensor,  # (rows,) int64
    *,
    temperature: float | Tensor = 1.0,  # scalar or (rows,)
) -> tuple[Tensor, Tensor]:  # log_probs (rows,), entropy (rows,)
    """Log-prob of each row's target and entropy of each row, differentiable, in the dtype of `logits` but at least fp32.

    `log p_j = z_j - log sum_i exp z_i` and `H = - sum_j p_j log p_j` with `z = logits / temperature`.
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = z / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    log_p = torch.log_softmax(z, dim=-1)
    selected = log_p.gather(1, targets[:, None]).squeeze(1)
    entropy = -torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p).sum(dim=-1)
    return selected, entropy
