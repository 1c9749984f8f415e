"""Log-probs, entropy and KL of the rows that count, without the logits of the rows that do not."""

from __future__ import annotations

from compact_logits.engine.vocab_shard import VocabShard
from compact_logits.errors import CompactLogitsError
from compact_logits.rows import RowSelection, scatter, select
from compact_logits.scorers import TokenStats, TopKKL, linear_log_probs, linear_topk_kl, log_probs, topk_kl

__all__ = [
    "CompactLogitsError",
    "RowSelection",
    "TokenStats",
    "TopKKL",
    "VocabShard",
    "linear_log_probs",
    "linear_topk_kl",
    "log_probs",
    "scatter",
    "select",
    "topk_kl",
]
