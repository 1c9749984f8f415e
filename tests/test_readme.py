"""The README's commands and code, run as they stand."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compact_logits import VocabShard
from compact_logits.cli.cpu_model import build_gpt, cpu_megatron, packed_seq_params
from compact_logits.cli.rollouts import SHIPPED
from compact_logits.cli.slime_recipe import LOOKED_AT
from tests.support.pictures import is_picture
from tests.support.ranks import RankPool
from tests.support.source_tree import ROOT

pytestmark = pytest.mark.slow

TEXT = (ROOT / "README.md").read_text()
# The environment that tools/demo and tools/test make at their first call; where it is not there yet, this one is used.
MADE = ROOT / ".venv" / f"py{sys.version_info.major}{sys.version_info.minor}" / "installed"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def launch_script() -> str:
    (script,) = [block for block in blocks("bash") if "train.py" in block]
    return script


COMMANDS = [line for block in blocks("bash") if "train.py" not in block for line in block.splitlines()]


def runnable(command: str, folder: Path) -> str:
    """The command as it can be run from a folder that is not the checkout, by this Python."""
    python = sys.executable
    name, _, rest = command.partition(" ")
    if name == "pip":
        # What it names is what gets built; nothing is fetched, and nothing of this environment changes.
        where = rest.removeprefix("install ").replace("'", "").replace(".", str(ROOT), 1)
        return f"{python} -m pip install --quiet --no-deps --no-build-isolation --target {folder}/site '{where}'"
    if name == "compact-logits":
        return f"{python} -m compact_logits {rest}"
    if name == "tools/demo":
        return f"{ROOT}/{command}" if MADE.exists() else f"{python} -m compact_logits demo {rest}"
    if name == "tools/test":
        # Of the suite that is running, one test that starts no suite.
        chosen = f"{ROOT}/tests/test_find_python.py"
        run = f"{ROOT}/{command}" if MADE.exists() else f"cd {ROOT} && {python} -m pytest {rest}"
        return f"{run} -q {chosen}"
    if name.startswith("tools/") and MADE.exists():
        return f"{ROOT}/{command}"
    if name.startswith("tools/"):
        return f"{python} -m compact_logits.cli.{name.removeprefix('tools/')} {rest}"
    raise AssertionError(f"the README has a command that this test does not know how to run: {command}")


def test_there_are_commands() -> None:
    assert {"tools/demo", "tools/test", "pip install ."} <= set(COMMANDS)
    assert any(command.startswith("compact-logits plan") for command in COMMANDS)


@pytest.mark.once
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_runs(command: str, tmp_path: Path) -> None:
    for module in ("rich", "matplotlib"):
        if "pip" not in command:
            pytest.importorskip(module)
    (tmp_path / "run.sh").write_text(launch_script())
    shutil.copy(SHIPPED, tmp_path / "rollouts.jsonl")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    call = ["bash", "-c", runnable(command, tmp_path)]
    done = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for picture in re.findall(r"--plot (\S+)", command):
        assert is_picture(tmp_path / picture)


def test_the_launch_script_runs_compact(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(launch_script())
    call = [sys.executable, "-m", "compact_logits", "doctor", "--slime", str(path), "--json"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    decision = json.loads(done.stdout)["slime_recipe"]
    assert decision["verdict"] == "compact" and decision["installs"] is True
    assert decision["settings"].get("COMPACT_LOGITS") == "1"


def test_every_piece_of_code_runs(rank_pool: RankPool) -> None:
    codes = blocks("python")
    assert len(codes) >= 4
    rank_pool.run(1, run_codes, codes)


def run_codes(rank: int, world: int, codes: list[str]) -> None:
    """Each with the names that it takes for granted, of a size for a CPU."""
    with cpu_megatron(rank, world, tp=1):
        for code in codes:
            if "attach(model)" in code:
                names = names_of_a_model()
            elif "torchforge" in code:
                names = names_of_a_batch()
            else:
                names = names_of_rows()
            exec(compile(code, "README.md", "exec"), names)
            results = [names[name] for name in ("stats", "kl", "log_probs") if name in names]
            tensors = [each for result in results for each in (result if isinstance(result, tuple) else (result,))]
            assert tensors and all(bool(torch.isfinite(each).all()) for each in tensors if each is not None), code
            if "attach(model)" in code:
                assert int((names["log_probs"] != 0).sum()) == 3
            elif "backward" in code:
                assert names["hidden"].grad.any() and names["weight"].grad.any()


def names_of_rows() -> dict[str, Any]:
    hidden = torch.randn(5, 32, requires_grad=True)
    return {
        "hidden": hidden,
        "weight": torch.randn(128, 32, requires_grad=True),
        "targets": torch.randint(0, 128, (5,)),
        "advantages": torch.randn(5),
        "shard": VocabShard(0, 128),
        "logits": torch.randn(5, 128, requires_grad=True),
        "teacher_log_probs": torch.log_softmax(torch.randn(5, 4), dim=-1),
        "teacher_ids": torch.randint(0, 128, (5, 4)),
    }


def names_of_a_batch() -> dict[str, Any]:
    head = torch.nn.Linear(32, 128, bias=False)
    return {
        "logits": torch.randn(2, 9, 128),
        "hidden": torch.randn(2, 9, 32),
        "model": SimpleNamespace(output=head),
        "response": torch.randint(0, 128, (2, 4)),
    }


def names_of_a_model() -> dict[str, Any]:
    tokens = [torch.arange(1, 8), torch.arange(11, 17)]
    masks = [torch.tensor([1, 0, 1]), torch.tensor([0, 1])]
    joined = torch.cat([*tokens, torch.zeros(3, dtype=torch.int64)])
    return {
        "model": build_gpt(tp=1, vocab=128),
        "tokens": tokens,
        "loss_masks": masks,
        "total_lengths": [7, 6],
        "response_lengths": [3, 2],
        "num_rows": 16,
        "input_ids": joined[None],
        "position_ids": torch.arange(16)[None],
        "loss_mask": torch.ones(1, 16),
        "packed_seq_params": packed_seq_params([0, 7, 13, 16]),
    }


def test_every_flag_that_decides_a_slime_recipe_is_named() -> None:
    assert [flag for flag in LOOKED_AT if f"`{flag}" not in TEXT] == []
