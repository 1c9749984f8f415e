"""What is computed of a row of logits. The chunked engine runs any of them and knows none."""

from __future__ import annotations

from compact_logits.scorers.log_prob import TokenStats, linear_log_probs, log_probs

__all__ = ["TokenStats", "linear_log_probs", "log_probs"]
