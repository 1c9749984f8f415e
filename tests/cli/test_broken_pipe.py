"""A reader that has gone, as `head` has once it has seen enough, ends a command without a word."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.source_tree import ROOT

PLAN = ["plan", "--vocab", "512", "--hidden", "8", "--tokens", "64", "--json"]


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", [PLAN, ["plan", "--help"]], ids=["a report", "a help text"])
def test_nobody_is_told_that_nobody_reads(arguments: list[str], unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "compact_logits", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=250,
        )
    finally:
        os.close(writing)
    assert done.stderr == "" and done.returncode in (0, 1) and (done.returncode == 1 or "--help" in arguments)
