"""What is computed of a row of logits. The engine runs scorers by their protocol and imports none of them."""

from __future__ import annotations

from compact_logits.scorers.log_prob import linear_log_probs, log_probs
from compact_logits.scorers.log_prob_scorer import TokenStats
from compact_logits.scorers.topk_kl import TopKKL, linear_topk_kl, topk_kl

__all__ = ["TokenStats", "TopKKL", "linear_log_probs", "linear_topk_kl", "log_probs", "topk_kl"]
