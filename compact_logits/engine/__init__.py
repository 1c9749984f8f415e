"""Per-row scalars of hidden states or logits: one loop over slices of the vocabulary, whatever is computed of a row."""

from __future__ import annotations
