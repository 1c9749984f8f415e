"""The wrapper of slime's advantages, which first sets log-probs of masked tokens to 0."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["advantages_wrapper"]

_FROM_OTHER_ENGINES = ("rollout_log_probs", "teacher_log_probs")


def advantages_wrapper(
    original: Callable[..., Any],
    cut: Callable[[Tensor, int, int], Tensor],  # slime's own, to this context-parallel rank's part of a response
    decide: Callable[[Namespace], bool],
) -> Callable[..., Any]:
    """Wrap slime's `compute_advantages_and_returns`: in a compacted run, the log-probs that the rollout engine and the
    teacher's report for masked tokens are set to 0 first, as the head's own are there.

    slime takes `exp(log_prob - rollout_log_prob)` of every token and multiplies by the mask after. With a reported
    -90 for a tool's token, where this package has 0, that is inf, and inf times 0 is NaN in the loss or its metrics.
    The rollout gets new lists and tensors. No collective, no device synchronisation.
    """

    def compute_advantages_and_returns(args: Namespace, rollout_data: dict[str, Any]) -> Any:
        if decide(args):
            lengths = [rollout_data[key] for key in ("loss_masks", "total_lengths", "response_lengths")]
            for key in _FROM_OTHER_ENGINES:
                if rollout_data.get(key):
                    rollout_data[key] = [
                        torch.where(cut(mask, total, response).to(value.device) != 0, value, 0.0)
                        for value, mask, total, response in zip(rollout_data[key], *lengths, strict=True)
                    ]
        return original(args, rollout_data)

    return compute_advantages_and_returns
