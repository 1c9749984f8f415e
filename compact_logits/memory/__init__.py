"""How many bytes a head takes, found by running its code on tensors that have a shape and no memory."""

from __future__ import annotations

from compact_logits.memory.simulate import HeadBytes, HeadSize, largest_fitting, simulate
from compact_logits.memory.tracker import StorageBytes

__all__ = ["HeadBytes", "HeadSize", "StorageBytes", "largest_fitting", "simulate"]
