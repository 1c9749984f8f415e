"""What users of slime plug in, and what reads rows that do not count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["advantage_of_log_probs", "count_everything", "mean_logit_loss", "unmasked_reducer", "unmasked_tis"]


def mean_logit_loss(args: Any, batch: Any, logits: Tensor, sum_of_sample_mean: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = logits.square().mean()
    return loss, {"loss": loss.detach()}


def advantage_of_log_probs(args: Any, rollout: dict[str, Any]) -> None:
    rollout["advantages"] = rollout["returns"] = [log_probs - log_probs.mean() for log_probs in rollout["log_probs"]]


def unmasked_reducer(totals: Any, responses: Any, masks: Any, per_token: bool) -> Any:
    return lambda values: values.mean() if values.numel() else values.sum()


def unmasked_tis(args: Any, *, pg_loss: Tensor, train_log_probs: Any, loss_masks: Any, **_: Any) -> Any:
    log_probs = torch.cat(train_log_probs)
    return pg_loss * log_probs.exp(), loss_masks, {"mean_log_prob": log_probs}


def count_everything(args: Any, rollout_id: int, rollout: dict[str, Any]) -> None:
    rollout["loss_masks"] = [torch.ones_like(mask) for mask in rollout["loss_masks"]]
