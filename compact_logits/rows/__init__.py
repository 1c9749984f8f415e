"""Which rows count, which tokens they hold on this context-parallel rank, and how to select and scatter them."""

from __future__ import annotations

from compact_logits.rows.contiguous import contiguous
from compact_logits.rows.layout import Layout, ResponseSpan, Run
from compact_logits.rows.packed import packed
from compact_logits.rows.selection import RowSelection, scatter, select
from compact_logits.rows.zigzag import zigzag

__all__ = ["Layout", "ResponseSpan", "RowSelection", "Run", "contiguous", "packed", "scatter", "select", "zigzag"]
