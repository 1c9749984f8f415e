"""The bytes that a simulation names are those that an allocation tracker sees in a real run of the same size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from compact_logits import linear_log_probs, linear_topk_kl
from compact_logits.engine import linear, matmul
from compact_logits.engine.kernels import torch_kernels
from compact_logits.engine.linear import score_hidden
from compact_logits.engine.slices import vocab_slices
from compact_logits.engine.vocab_shard import VocabShard
from compact_logits.memory import HeadSize, simulate
from compact_logits.memory.heads import full_head, full_topk_head
from compact_logits.scorers.log_prob_scorer import LogProbScorer, inverse_temperatures
from compact_logits.scorers.top_p import TopPMask, TopPScorer
from tests.support.allocation import AllocationTracker

SIZE = HeadSize(rows=512, kept=208, vocab=6007, hidden=48, dtype=torch.float32, chunk_bytes=2**20)

each_path = pytest.mark.parametrize("path", ["full", "compact"])


@pytest.fixture
def cut_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU cuts into a GPU's slices, and its kernels and products hold next to nothing of their own."""

    def slices(rows: int, columns: int, hidden: int, dtype: torch.dtype, _: torch.device, budget: int | None) -> Any:
        return vocab_slices(rows, columns, hidden, dtype, torch.device("meta"), budget)

    monkeypatch.setattr(linear, "vocab_slices", slices)
    monkeypatch.setattr(torch_kernels, "_CPU_BLOCK", 2**14)
    monkeypatch.setattr(matmul, "_WIDENED_BYTES", 2**14)


def run(size: HeadSize, path: str, hidden: Any, weight: Any, random: torch.Generator) -> tuple[Any, ...]:
    """Forward of a real head of this size."""
    rows = hidden if path == "full" else hidden.index_select(0, torch.arange(size.kept))
    targets = torch.randint(size.vocab, (len(rows),), generator=random)
    options: Any = {"temperature": size.temperature}
    if size.top_k:
        ids = torch.randint(size.vocab, (len(rows), size.top_k), generator=random)
        teacher = torch.randn(len(rows), size.top_k, generator=random).log_softmax(1)
        if path == "full":
            return (full_topk_head(rows, weight, teacher, ids, **options),)
        return tuple(linear_topk_kl(rows, weight, teacher, ids, chunk_bytes=size.chunk_bytes, **options))
    ids = torch.randint(size.vocab, (len(rows), size.nucleus_ids), generator=random)
    if path == "full":
        if size.nucleus_ids:
            options["keep"] = torch.zeros(len(rows), size.vocab, dtype=torch.bool).scatter_(1, ids, True)
        options |= {"entropy_gradient": size.entropy == "loss", "with_entropy": size.entropy != "none"}
        return full_head(rows, weight, targets, **options)
    if not size.nucleus_ids:
        options |= {"entropy": size.entropy, "chunk_bytes": size.chunk_bytes}
        return tuple(linear_log_probs(rows, weight, targets, **options))
    row_of = torch.arange(len(rows)).repeat_interleave(size.nucleus_ids)
    inverse = inverse_temperatures(size.temperature, targets, torch.float32)
    base = LogProbScorer(targets, VocabShard(0, size.vocab), inverse, size.entropy)
    mask = TopPMask(ids.sort(dim=1).values.flatten(), row_of, torch.ones(len(rows), dtype=torch.bool))
    return score_hidden(rows, weight, None, TopPScorer(base, mask), chunk_bytes=size.chunk_bytes)


def measured(size: HeadSize, path: str) -> tuple[int, int, int]:
    """Forward peak, saved and backward peak of a real run, beyond its inputs."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.rows, size.hidden, generator=random).to(size.dtype).requires_grad_()
    weight = torch.randn(size.vocab, size.hidden, generator=random).to(size.dtype).requires_grad_(not size.frozen)
    with AllocationTracker() as seen:
        outputs = [each for each in run(size, path, hidden, weight, random) if each is not None]
        forward, saved = seen.peak_bytes, seen.live_bytes
        seen.peak_bytes = seen.live_bytes
        torch.autograd.backward([each.sum() for each in outputs if each.requires_grad])
        return forward, saved, seen.peak_bytes


@each_path
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"entropy": "metric", "temperature": 0.7},
        {"entropy": "none", "frozen": True},
        {"dtype": torch.bfloat16},
        {"kept": 9},  # one slice
        {"kept": 512, "chunk_bytes": 300_000},  # many, none kept
        {"nucleus_ids": 9, "entropy": "metric", "temperature": 0.7},
        {"nucleus_ids": 9, "entropy": "none"},
        {"top_k": 16},
        {"top_k": 16, "temperature": 0.7, "kept": 512},
    ],
    ids=str,
)
def test_within_a_tenth_of_a_real_run(path: str, changed: dict, cut_as_on_a_gpu: None) -> None:
    size = replace(SIZE, **changed)
    guess = simulate(size, path)  # type: ignore[arg-type]
    for name, real in zip(("forward", "saved", "backward"), measured(size, path), strict=True):
        assert abs(getattr(guess, name) - real) <= 0.1 * real, (name, getattr(guess, name), real)


def test_the_budget_shows_and_is_a_gpus_by_default() -> None:
    """It would not be the real code if the budget did not show."""
    large = replace(SIZE, rows=2**17, kept=60_000, chunk_bytes=None)  # 1.34 GiB of logits
    assert simulate(large, "compact") == simulate(replace(large, chunk_bytes=2**30), "compact")
    assert 0.9 * 2**30 < simulate(large, "compact").forward < 1.1 * 2**30
    all_at_once, cut = simulate(replace(SIZE, chunk_bytes=2**30), "compact"), simulate(SIZE, "compact")
    assert all_at_once.forward > 3 * cut.forward
    assert simulate(SIZE, "full").forward > 10 * cut.forward


def test_tensor_parallelism_halves_the_full_path_and_leaves_no_group_behind() -> None:
    size = replace(SIZE, vocab=6016, hidden=16)
    one, two = (simulate(replace(size, tp=tp), "full") for tp in (1, 2))
    assert two.peak < 0.55 * one.peak
    for sequence_parallel in (True, False):
        compact = simulate(replace(size, tp=2, sequence_parallel=sequence_parallel), "compact")
        assert 0 < compact.peak < two.peak / 5
    assert not dist.is_initialized()


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_torch_without_collectives_of_meta_tensors_counts_the_same(sequence_parallel: bool) -> None:
    size = replace(SIZE, vocab=6016, hidden=16, tp=2, sequence_parallel=sequence_parallel)
    paths = ("full", "compact")
    expected = [simulate(size, path) for path in paths]  # type: ignore[arg-type]
    with mock.patch.object(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: False):
        assert [simulate(size, path) for path in paths] == expected  # type: ignore[arg-type]
    assert [simulate(size, path) for path in paths] == expected, "torch's own are back"  # type: ignore[arg-type]


@each_path
def test_a_fused_weight_gradient_takes_no_buffer_of_its_own(path: Any) -> None:
    size = replace(SIZE, hidden=4096, rows=64, kept=32)
    plain, fused = (simulate(replace(size, fused=fused), path) for fused in (False, True))
    assert plain.backward - fused.backward >= 0.9 * size.vocab * size.hidden * 4


def test_a_16_bit_sum_is_fp32_and_no_factor_is_widened() -> None:
    """A GPU adds 16-bit products in fp32 by itself."""
    size = HeadSize(rows=64, kept=64, vocab=2**16, hidden=8192, fused=True, chunk_bytes=1)
    sum_and_rounded = 64 * 8192 * (4 + 2)
    least_slice = 64 * (8192 // 4) * 2
    assert simulate(size, "compact").backward <= simulate(size, "compact").saved + sum_and_rounded + 2 * least_slice


def test_a_top_p_set_is_no_mask_on_the_compact_path() -> None:
    """Its bytes follow the ids that are listed, whatever the vocabulary; a mask's follow the vocabulary."""
    full, compact = (
        [
            simulate(replace(size, nucleus_ids=9), path).forward - simulate(size, path).forward  # type: ignore[arg-type]
            for size in (SIZE, replace(SIZE, vocab=4 * SIZE.vocab))
        ]
        for path in ("full", "compact")
    )
    assert full[0] > SIZE.rows * SIZE.vocab and full[1] > 3.9 * full[0]
    entries = SIZE.kept * 9
    assert 8 * entries <= compact[1] <= compact[0] <= 8 * 6 * entries


def test_one_full_shard_costs_the_padding_of_the_others() -> None:
    size = replace(SIZE, tp=4, vocab=6016, hidden=1024, kept=96)
    even, uneven = (simulate(replace(size, most_on_shard=most), "compact") for most in (None, 90))
    padding = 4 * (90 - 24) * 1024 * 4
    assert uneven.forward - even.forward >= 0.8 * padding


def test_without_kept_rows_there_is_the_gradient_of_the_hidden_states() -> None:
    size = replace(SIZE, tp=2, vocab=6016, kept=0)
    gradient = 256 * 48 * 4
    assert gradient <= simulate(replace(size, fused=True), "compact").backward <= 2.1 * gradient
