"""Scorers as the public functions make them, for tests that hand them to the engine."""

from __future__ import annotations

import torch
from torch import Tensor

from compact_logits.engine.vocab_shard import VocabShard
from compact_logits.scorers.log_prob_scorer import Entropy, LogProbScorer, inverse_temperatures

__all__ = ["log_prob_scorer"]


def log_prob_scorer(
    targets: Tensor,  # (rows,) int64
    shard: VocabShard,
    temperature: float | Tensor,  # scalar or (rows,)
    entropy: Entropy,
    dtype: torch.dtype = torch.float32,  # fp64 for fp64 logits
) -> LogProbScorer:
    return LogProbScorer(targets, shard, inverse_temperatures(temperature, targets, dtype), entropy)
