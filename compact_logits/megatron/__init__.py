"""The compact head of a megatron-core GPTModel. Knows megatron-core, knows no RL framework."""

from __future__ import annotations

from compact_logits.megatron.attach import attach, attached, detach
from compact_logits.megatron.request import Outcome, Request, mark, request_of

__all__ = ["Outcome", "Request", "attach", "attached", "detach", "mark", "request_of"]
