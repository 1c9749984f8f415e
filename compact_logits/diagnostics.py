"""What an integration reports of itself: one line of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Diagnostic"]


@dataclass(frozen=True)
class Diagnostic:
    """`state`: `"on"` where the compact path is in use, `"off"` where it was not asked for or has nothing to act on,
    `"refused"` where it was asked for and the full path runs instead, for `reason`; `remedy` says what changes that."""

    name: str
    state: Literal["on", "off", "refused"]
    reason: str = ""
    remedy: str = ""
