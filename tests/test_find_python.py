"""tools/find-python takes the first interpreter that runs, not the first that is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT

SHIM = "#!/bin/sh\necho 'python3.99 exists in other versions only' >&2\nexit 127\n"
WORKING = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
OLD = "#!/bin/sh\necho /usr/bin/python3.99\nexit 1\n"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder `path` that stands first on the PATH, and a folder `pyenv`."""
    (tmp_path / "path").mkdir()
    (tmp_path / "pyenv/versions/3.99.1/bin").mkdir(parents=True)
    return tmp_path


def put(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def find(machine: Path, name: str = "python3.99") -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PATH": f"{machine / 'path'}:{os.environ['PATH']}", "PYENV_ROOT": str(machine / "pyenv")}
    command = [str(ROOT / "tools/find-python"), name]
    return subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)


def test_takes_the_command_on_the_path(machine: Path) -> None:
    put(machine / "path/python3.99", WORKING)
    found = find(machine)
    assert (found.returncode, found.stdout.strip()) == (0, sys.executable)


def test_passes_over_a_shim_that_only_complains(machine: Path) -> None:
    put(machine / "path/python3.99", SHIM)
    put(machine / "pyenv/versions/3.99.1/bin/python3.99", WORKING)
    found = find(machine)
    assert (found.returncode, found.stdout.strip()) == (0, sys.executable)


def test_takes_a_path(machine: Path) -> None:
    put(machine / "path/mine", WORKING)
    assert find(machine, str(machine / "path/mine")).stdout.strip() == sys.executable


@pytest.mark.parametrize("text", [SHIM, OLD])
def test_says_so_where_none_works(machine: Path, text: str) -> None:
    put(machine / "path/python3.99", text)
    found = find(machine)
    assert (found.returncode, found.stdout) == (1, "")
    assert "no working python3.99 (3.10 or newer, with venv)" in found.stderr
