"""Marks on the tokens passed to `get_logprobs`: which log-probs count, and the temperature."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compact_logits.engine.validation import check_temperature
from compact_logits.errors import InputError

__all__ = ["Mark", "mark_of", "mark_tokens"]

_ATTRIBUTE = "_compact_logits_mark"


@dataclass(frozen=True, eq=False)
class Mark:
    loss_mask: Tensor | None = None  # (batch, sequence - 1), any dtype, counts where it is not 0
    temperature: float = 1.0


def mark_tokens(
    tokens: Tensor,  # (batch, sequence) int64
    *,
    loss_mask: Tensor | None = None,  # (batch, sequence - 1)
    temperature: float = 1.0,
) -> Tensor:
    """Say which of the log-probs of `tokens` count, and return `tokens`, to be passed to `get_logprobs` as they are.

    `loss_mask` is aligned with the log-probs returned: entry j says whether the log-prob of token j + 1 counts (a
    generation mask without its first column). The others are not computed: they are exactly 0, with exactly zero
    gradient. Old, reference and current log-probs of the same tokens must all be taken with the same mask and
    temperature, since `exp(current - old)` of a log-prob and a 0 may overflow, and infinity times a mask of 0 is NaN.

    The mark is an attribute of this tensor. A copy, to another device say, does not have it, and then every log-prob is
    computed. Without `install` it does nothing. Megatron's sequence packing needs no call: bins are marked on the way.

    Raises `InputError` for another shape of mask, and for a temperature that is not positive and finite.
    """
    if tokens.dim() != 2 or tokens.dtype != torch.int64:
        raise InputError(f"needed int64 tokens (batch, sequence), got {tuple(tokens.shape)} of {tokens.dtype}")
    expected = (tokens.shape[0], tokens.shape[1] - 1)
    if loss_mask is not None and tuple(loss_mask.shape) != expected:
        raise InputError(
            f"needed a loss mask {expected}, one entry for each log-prob, got {tuple(loss_mask.shape)}; "
            f"of a mask over all tokens, pass mask[:, 1:]"
        )
    check_temperature(temperature, ())
    setattr(tokens, _ATTRIBUTE, Mark(loss_mask, float(temperature)))
    return tokens


def mark_of(tokens: Tensor) -> Mark:
    """The mark of these tokens; without one, every log-prob counts, at temperature 1."""
    return getattr(tokens, _ATTRIBUTE, Mark())
