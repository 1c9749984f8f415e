"""torchforge and torchtitan: log-probs over logits that are sharded on the vocabulary."""

from __future__ import annotations

from compact_logits.integrations.torchforge.hidden import compute_logprobs_from_hidden
from compact_logits.integrations.torchforge.logits import compute_logprobs

__all__ = ["compute_logprobs", "compute_logprobs_from_hidden"]
