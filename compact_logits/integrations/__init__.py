"""The frameworks. Each module has the same four names: `SUPPORTED`, `check`, `install`, `uninstall`."""

from __future__ import annotations

__all__ = ["INTEGRATIONS"]

# Modules of this package, imported by whoever uses one.
INTEGRATIONS = ("slime", "megatron_rl", "verl", "torchforge")
