"""The Triton kernels under Triton's interpreter, on the CPU: each file of tests runs in a process of its own, since the
interpreter must be asked for before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# The interpreter of older ones fails with numpy 2.4.
pytest.importorskip("triton", minversion="3.7", reason="Triton 3.7 or newer is not installed")
pytest.importorskip("numpy", reason="Triton's interpreter needs numpy")


@pytest.mark.parametrize(
    "name", ["test_kernels", "interpreted_scorers", pytest.param("interpreted_faults", marks=pytest.mark.once)]
)
def test_under_the_interpreter(name: str) -> None:
    file = Path(__file__).with_name(f"{name}.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(file)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout
