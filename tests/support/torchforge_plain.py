"""torchforge's definition of a response's log-probs, in dense torch: the truth, and what a plain path makes of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["plain_logprobs"]


def plain_logprobs(
    logits: Tensor,  # (batch, positions, vocab)
    ids: Tensor,  # (batch, target positions) int64
    temperature: float = 1.0,
    align: bool = True,
) -> Tensor:  # (batch, target positions), in the dtype of logits but at least fp32
    """The logits one position before each id (or as they are), divided in their dtype, widened, and read at the id."""
    if align:
        logits = logits[:, -ids.shape[1] - 1 : -1]
    tempered = logits / temperature
    wide = tempered.to(torch.promote_types(logits.dtype, torch.float32))
    return -F.cross_entropy(wide.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)
