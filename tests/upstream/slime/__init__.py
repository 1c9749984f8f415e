"""slime's own Megatron actor on CPU, from source and over its pinned Megatron, to compare both paths."""

from __future__ import annotations
