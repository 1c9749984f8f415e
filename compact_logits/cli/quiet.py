"""Imports of frameworks that would speak of themselves."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

__all__ = ["quiet"]


@contextmanager
def quiet() -> Iterator[None]:
    """On import, frameworks warn of optional packages that they miss; standard output is for the report."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
