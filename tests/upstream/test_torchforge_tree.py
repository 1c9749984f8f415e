"""Against a torchforge checkout, `TORCHFORGE_ROOT`: its own tests with our function, and its function beside ours."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from compact_logits.integrations.torchforge import compute_logprobs, compute_logprobs_from_hidden
from tests.support.meshes import cut, mesh_of
from tests.support.ranks import RankPool
from tests.support.source_tree import ROOT as HERE
from tests.support.torchforge_tree import forge_modules

ROOT = os.environ.get("TORCHFORGE_ROOT", "")
TESTS = Path(ROOT) / "tests" / "unit_tests" / "util" / "test_ops.py"
pytestmark = pytest.mark.skipif(not ROOT, reason="TORCHFORGE_ROOT is unset")


needs_tests = pytest.mark.skipif(not TESTS.is_file(), reason=f"no {TESTS} in the checkout at TORCHFORGE_ROOT")


def run_their_tests(folder: Path, setting: str) -> subprocess.CompletedProcess[str]:
    # A copy elsewhere: in their tree, their package `tests` would hide ours, and the plugin with it.
    shutil.copy(TESTS, folder)
    (folder / "pytest.ini").write_text("[pytest]\n")
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "tests.support.torchforge_plugin", str(folder / TESTS.name)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(folder / "pytest.ini"), *arguments],
        cwd=HERE,
        env={**os.environ, "COMPACT_LOGITS": setting},
        capture_output=True,
        text=True,
        timeout=280,
    )


@needs_tests
def test_their_tests_pass_with_our_function(tmp_path: Path) -> None:
    done = run_their_tests(tmp_path, "strict")
    assert done.returncode == 0, done.stdout + done.stderr
    passed, calls = re.search(r"(\d+) passed", done.stdout), re.search(r"answered (\d+) calls", done.stdout)
    assert passed and int(passed[1]) >= 8 and calls and int(calls[1]) >= int(passed[1])


@needs_tests
def test_without_install_ours_answers_none_of_their_calls(tmp_path: Path) -> None:
    done = run_their_tests(tmp_path, "0")
    assert done.returncode == 0 and "answered 0 calls" in done.stdout, done.stdout + done.stderr


def beside_theirs(rank: int, world: int, vocab: int, dtype: torch.dtype, scale: float) -> list[float]:
    """Largest differences of values and gradients, from logits and from hidden states."""
    torch.manual_seed(vocab)
    hidden, weight = torch.randn(2, 6, 8), torch.randn(vocab, 8) * scale
    logits = (hidden @ weight.T).to(dtype)
    ids, upstream = torch.randint(0, vocab, (2, 4)), torch.randn(2, 4)
    mesh = mesh_of(world)
    with forge_modules(ROOT):
        theirs = importlib.import_module("forge.util.ops").compute_logprobs
    gathered, sharded = (cut(logits, mesh, [Shard(2)], grad=True) for _ in range(2))
    differences = _differ(
        theirs(gathered.full_tensor(), ids), compute_logprobs(sharded, ids), upstream, gathered, sharded
    )
    if dtype == torch.float32:
        head, plain = cut(weight, mesh, [Shard(0)], grad=True), weight.clone().requires_grad_()
        ours = compute_logprobs_from_hidden(hidden, head, ids, chunk_bytes=1000)
        differences += _differ(theirs(hidden @ plain.T, ids), ours, upstream, plain, head)
    return differences


def _differ(theirs: Tensor, ours: Tensor, upstream: Tensor, their_leaf: Tensor, our_leaf: Tensor) -> list[float]:
    theirs.backward(upstream)
    ours.backward(upstream)
    scale = max(theirs.abs().max().item(), 1.0)
    grads = [
        leaf.grad.full_tensor() if isinstance(leaf.grad, DTensor) else leaf.grad for leaf in (their_leaf, our_leaf)
    ]
    value = (theirs - ours).abs().max().item() / scale
    largest = max(grads[0].abs().max().item(), 1.0)
    return [value, (grads[0].double() - grads[1].double()).abs().max().item() / largest]


@pytest.mark.parametrize(("world", "vocab"), [(2, 12), (2, 13), (4, 13), (4, 5)])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_values_and_gradients_are_theirs_on_gathered_logits(
    rank_pool: RankPool, world: int, vocab: int, scale: float
) -> None:
    for differences in rank_pool.run(world, beside_theirs, vocab, torch.float32, scale):
        assert len(differences) == 4 and max(differences) <= 1e-5


def test_of_bf16_logits_the_values_are_theirs_too(rank_pool: RankPool) -> None:
    for values, gradients in rank_pool.run(2, beside_theirs, 13, torch.bfloat16, 1.0):
        assert values <= 1e-5 and gradients <= 2**-8
