"""The frameworks. Each module has the same four names: `SUPPORTED`, `check`, `install`, `uninstall`."""

from __future__ import annotations
