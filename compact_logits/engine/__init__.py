"""Per-row scalars of hidden states or logits, computed by one loop over slices of the vocabulary."""

from __future__ import annotations
