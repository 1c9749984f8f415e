"""slime's own tests of log-probs, entropy, losses and context parallelism, without this package and with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT
from tests.upstream.slime.tree import needs_trees

pytestmark = needs_trees

STARTUP = ROOT / "tests/upstream/slime/startup"
# All that need neither a GPU nor a package that is blank here, and read or stand beside what is replaced. The second
# and third list start processes of their own.
IN_PROCESS = (
    "cispo_loss",
    "cp_utils",
    "discounted_returns",
    "logprob_response_spans",
    "metric_report",
    "policy_loss",
    "ppo_kl_metric",
    "value_temperature",
)
SPAWNED_PER_VOCABULARY_SHARD = ("ppo_logprob_entropy",)
SPAWNED_PER_CONTEXT_RANK = ("loss_cp_invariance", "advantage_whiten_cp")


def run(names: tuple[str, ...], setting: str) -> int:
    """How many of slime's tests passed. Fails where any did not, or the setting was not the one in force."""
    root = Path(os.environ["SLIME_ROOT"])
    environment = {
        **os.environ,
        "COMPACT_LOGITS": setting,
        "PYTHONPATH": os.pathsep.join([str(STARTUP), str(ROOT)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    tests = [str(STARTUP / "check_installed.py"), *(str(root / f"tests/test_{name}.py") for name in names)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(root), *tests]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, f"COMPACT_LOGITS={setting}: {(done.stdout + done.stderr)[-6000:]}"
    # All passed: none was skipped, deselected or expected to fail.
    (passed,) = re.findall(r"^(?:=* )?(\d+) passed(?:, \d+ warnings?)? in ", done.stdout, re.MULTILINE)
    return int(passed)


@pytest.mark.parametrize("setting", ["0", "1"], ids=["without", "with"])
@pytest.mark.parametrize(
    ("names", "tests"),
    [(IN_PROCESS, 83), (SPAWNED_PER_VOCABULARY_SHARD, 23), (SPAWNED_PER_CONTEXT_RANK, 13)],
    ids=["in one process", "over a vocabulary", "over contexts"],
)
def test_they_pass(names: tuple[str, ...], tests: int, setting: str) -> None:
    assert run(names, setting) == tests
