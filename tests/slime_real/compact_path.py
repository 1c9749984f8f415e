"""The compact path as a user of slime switches it on."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

__all__ = ["compact_path"]


@contextmanager
def compact_path(args: Namespace) -> Iterator[None]:
    """`install`, with the run's arguments, under `COMPACT_LOGITS=1` (or what is set); then `uninstall`."""
    from compact_logits.integrations import slime

    with patch.dict(os.environ, {"COMPACT_LOGITS": os.environ.get("COMPACT_LOGITS", "1")}):
        slime.install(args)
        try:
            yield
        finally:
            slime.uninstall()
