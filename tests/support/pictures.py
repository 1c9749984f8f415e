"""Whether a file is a picture that somebody could read."""

from __future__ import annotations

from pathlib import Path

__all__ = ["is_picture"]


def is_picture(path: Path) -> bool:
    """A PNG of a readable size with something in it: a blank one of that size is far smaller."""
    content = path.read_bytes()
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    return content[:8] == b"\x89PNG\r\n\x1a\n" and len(content) > 15_000 and width > 1200 and height > 500
