"""The micro-batch that fits, and the simulation that says so, held against real passes of the same size."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from compact_logits.cli.cpu_model import cpu_megatron
from compact_logits.cli.megatron_rl_fit import main
from compact_logits.engine import matmul
from compact_logits.errors import InputError
from compact_logits.integrations.megatron_rl.fit import Path, Policy, head_bytes, largest_micro_batch
from compact_logits.memory import StorageBytes
from tests.support.megatron_rl_passes import compacted
from tests.support.megatron_rl_stand_in import build_stand_in, stand_in
from tests.support.megatron_rl_tree import needs_tree, on_tree_ranks, rl_utils_on_cpu, settings
from tests.support.ranks import RankPool

pytestmark = pytest.mark.slow

BATCH, SEQUENCE, VOCAB, CHUNK = 3, 64, 4096, 2**20
QWEN = Policy(vocab=248_320, hidden=4096, sequence=8192, tp=2)


def policy_of(tp: int, dtype: torch.dtype) -> Policy:
    return Policy(
        vocab=VOCAB,
        hidden=BATCH * SEQUENCE,
        sequence=SEQUENCE,
        tp=tp,
        dtype=dtype,
        fused=False,
        chunk_bytes=CHUNK,
    )


def peak_of(rl_utils: Any, tp: int, dtype: torch.dtype, path: Path) -> int:
    policy = build_stand_in(torch.randn(BATCH, SEQUENCE, VOCAB), dtype=dtype, sequence_parallel=tp > 1)
    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    peaks = []
    for _ in range(3):  # gloo's own thread may hold a buffer of a collective that is over: least is what the pass holds
        # A GPU adds products in fp32 without copies of their factors, and so the simulation counts none.
        with StorageBytes() as counted, mock.patch.object(matmul, "_WIDENED_BYTES", 2**14):
            rl_utils.get_logprobs(policy, tokens, tokens).sum().backward()
        policy.zero_grad(set_to_none=True)
        peaks.append(counted.peak)
    return min(peaks)


def stand_in_peaks(rank: int, world: int, dtype: torch.dtype) -> dict[Path, int]:
    with stand_in(bf16=dtype == torch.bfloat16) as rl_utils, cpu_megatron(rank, world, tp=world):
        gathered = peak_of(rl_utils, world, dtype, "gathered")
        with compacted(COMPACT_LOGITS_CHUNK_BYTES=str(CHUNK)):
            return {"gathered": gathered, "compact": peak_of(rl_utils, world, dtype, "compact")}


@pytest.mark.parametrize("world", [1, 2])
def test_simulated_bytes_are_those_of_a_real_pass(rank_pool: RankPool, world: int) -> None:
    for peaks in rank_pool.run(world, stand_in_peaks, torch.bfloat16):
        for path, peak in peaks.items():
            simulated = head_bytes(policy_of(world, torch.bfloat16), BATCH, path).peak
            assert simulated == pytest.approx(peak, rel=0.1), path


def tree_peaks(rank: int, world: int, dtype: torch.dtype) -> dict[Path, int]:
    with rl_utils_on_cpu(rank, world, tp=2, args=settings(bf16=dtype == torch.bfloat16)) as rl_utils:
        # With fp32_output=False, a Float16Module would hand everything on as it is.
        gathered = peak_of(rl_utils, 2, dtype, "gathered")
        with compacted(COMPACT_LOGITS_CHUNK_BYTES=str(CHUNK)):
            return {"gathered": gathered, "compact": peak_of(rl_utils, 2, dtype, "compact")}


@needs_tree
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_simulated_bytes_are_those_of_megatrons_own_pass(dtype: torch.dtype) -> None:
    for peaks in on_tree_ranks(tree_peaks, dtype):
        for path, peak in peaks.items():
            assert head_bytes(policy_of(2, dtype), BATCH, path).peak == pytest.approx(peak, rel=0.1), path


@pytest.mark.parametrize("path", ["gathered", "compact"])
def test_the_largest_fits_and_one_more_does_not(path: Path) -> None:
    small = replace(policy_of(2, torch.bfloat16), hidden=64, density=0.25)
    memory, rest = 24 * 2**20, 2**18
    largest = largest_micro_batch(small, path, memory, bytes_per_sequence=rest)
    peaks = [head_bytes(small, batch, path).peak + batch * rest for batch in (largest, largest + 1)]
    assert largest > 0 and peaks[0] <= memory < peaks[1]
    assert largest < largest_micro_batch(small, path, memory)
    assert largest_micro_batch(small, path, 2**18) == 0
    assert largest_micro_batch(replace(small, vocab=8, hidden=2, sequence=2), path, 2**40) == 4096


def test_more_sequences_fit_on_the_compact_path() -> None:
    memory = 40 * 2**30
    assert largest_micro_batch(QWEN, "gathered", memory) == 4
    assert head_bytes(QWEN, 140, "compact").peak < memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_further_sequence_adds_the_same(dtype: torch.dtype) -> None:
    import compact_logits.integrations.megatron_rl.fit as fit

    policy = replace(policy_of(2, dtype), hidden=64)
    for batch in (17, 40):
        simulated, told = fit._gathered(policy, batch), head_bytes(policy, batch, "gathered")
        assert told.peak == pytest.approx(simulated.peak, rel=1e-3)
        assert told.saved == pytest.approx(simulated.saved, rel=1e-3)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"density": 1.5}, "a share of the log-probs, from 0 to 1, got 1.5"),
        ({"sequence": 1}, "a log-prob needs a token and the one before it"),
        ({"tp": 3}, "needs vocabulary .* that it divides"),
    ],
)
def test_sizes_that_make_no_head(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        replace(QWEN, **changed)


SIZES = ["--vocab", "4096", "--hidden", "64", "--sequence", "64", "--tp", "2", "--density", "0.5"]


def test_the_tool_prints_what_the_function_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIZES, "--memory", "24MiB", "--bytes-per-sequence", "1MiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    policy = Policy(vocab=4096, hidden=64, sequence=64, tp=2, density=0.5)
    for path in ("gathered", "compact"):
        largest = largest_micro_batch(policy, path, 24 * 2**20, bytes_per_sequence=2**20)
        assert found[path]["micro_batch"] == largest > 0
        assert found[path]["peak_bytes"] <= found["memory_bytes"] == 24 * 2**20
    assert main([*SIZES, "--memory", "1MiB"]) == 0
    said = capsys.readouterr().out
    assert "that fits 0.00 GiB" in said and "gathered      0   one alone takes" in said


@pytest.mark.parametrize(("given", "text"), [("--memory 40Gb", "got '40Gb'"), ("--memory 1GiB --tp 3", "divides")])
def test_wrong_use_is_one_line(capsys: pytest.CaptureFixture[str], given: str, text: str) -> None:
    assert main([*SIZES, *given.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and text in captured.err and captured.err.count("\n") == 1
