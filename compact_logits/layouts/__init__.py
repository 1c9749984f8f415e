"""Where the tokens of a packed micro-batch stand on one context-parallel rank, and which response each row predicts."""

from __future__ import annotations

from compact_logits.layouts.contiguous import contiguous
from compact_logits.layouts.layout import Layout, ResponseSpan, Run
from compact_logits.layouts.packed import packed
from compact_logits.layouts.zigzag import zigzag

__all__ = ["Layout", "ResponseSpan", "Run", "contiguous", "packed", "zigzag"]
