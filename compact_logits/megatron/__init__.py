"""The compact head of a megatron-core GPTModel. Knows megatron-core, knows no RL framework."""

from __future__ import annotations

from compact_logits.megatron.attach import attach, attached, detach, metrics_of
from compact_logits.megatron.metrics import HeadMetrics
from compact_logits.megatron.request import Outcome, Request, mark, request_of

__all__ = ["HeadMetrics", "Outcome", "Request", "attach", "attached", "detach", "mark", "metrics_of", "request_of"]
