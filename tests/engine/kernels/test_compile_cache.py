"""Ranks that compile the same kernels into one empty cache folder at the same time do not hinder each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.source_tree import ROOT

pytestmark = pytest.mark.slow

pytest.importorskip("triton", minversion="3.7", reason="Triton 3.7 or newer is not installed")

RANKS = 4


def compile_at_once(cache: Path, meeting: Path, ranks: int) -> list[dict[str, Any]]:
    meeting.mkdir()
    command = [sys.executable, "-m", "tests.support.compile_worker", str(meeting)]
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(ranks)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    answers = [worker.communicate(timeout=250)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * ranks
    return [json.loads(answer) for answer in answers]


def files(cache: Path) -> dict[Path, tuple[int, int]]:  # path to size and time of change
    stats = {path: path.stat() for path in cache.rglob("*") if path.is_file()}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


@pytest.mark.once
def test_ranks_share_a_cache_folder_that_is_empty_at_first(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    answers = compile_at_once(cache, tmp_path / "first", RANKS)
    assert all(answer["cubins"] == answers[0]["cubins"] for answer in answers)
    written = files(cache)
    assert len([path for path in written if path.suffix == ".cubin"]) >= len(set(answers[0]["cubins"]))
    assert not [path for path in cache.rglob("*") if "tmp" in path.name]
    # Whoever comes later compiles nothing.
    (late,) = compile_at_once(cache, tmp_path / "second", 1)
    assert late["cubins"] == answers[0]["cubins"]
    assert files(cache) == written
