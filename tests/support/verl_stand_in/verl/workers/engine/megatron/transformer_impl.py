"""The module whose import says that this process trains with Megatron."""

from __future__ import annotations
