"""The compact path as a user of slime switches it on."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

__all__ = ["compact_path"]


# Small enough that every micro-batch here takes several chunks of a few rows.
_SETTINGS = {"COMPACT_LOGITS": "1", "COMPACT_LOGITS_CHUNK_BYTES": "3KiB"}


@contextmanager
def compact_path(args: Namespace) -> Iterator[None]:
    """`install`, with the run's arguments, under the settings above or those of the environment; then `uninstall`."""
    from compact_logits.integrations import slime

    with patch.dict(os.environ, {**_SETTINGS, **{name: os.environ[name] for name in _SETTINGS if name in os.environ}}):
        slime.install(args)
        try:
            yield
        finally:
            slime.uninstall()
