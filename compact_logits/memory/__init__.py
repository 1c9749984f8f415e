"""How many bytes a head takes, found by running its code on tensors that have a shape and no memory."""

from __future__ import annotations

from compact_logits.memory.fitting import largest_fitting
from compact_logits.memory.simulate import simulate
from compact_logits.memory.size import HeadBytes, HeadSize
from compact_logits.memory.tracker import StorageBytes

__all__ = ["HeadBytes", "HeadSize", "StorageBytes", "largest_fitting", "simulate"]
