"""The simulated bytes of heads with a nucleus or a teacher, of fused heads, of uneven shards: those of a real run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from compact_logits import chunks, linear_topk_kl
from compact_logits.errors import InputError
from compact_logits.memory import HeadSize, largest_fitting, simulate
from compact_logits.memory.heads import full_head, full_topk_head
from compact_logits.engine.linear import score_hidden
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from compact_logits.scorers.top_p import TopPMask, TopPScorer
from compact_logits.engine.vocab_shard import VocabShard
from tests.support.allocation import AllocationTracker

SIZE = HeadSize(rows=512, kept=208, vocab=6007, hidden=48, dtype=torch.float32, chunk_bytes=2**20)


def run(size: HeadSize, path: str, hidden: Any, weight: Any, random: torch.Generator) -> tuple[Any, ...]:
    """Forward of a real head with a nucleus or a teacher of `size`."""
    rows = hidden if path == "full" else hidden[: size.kept]
    targets = torch.randint(size.vocab, (len(rows),), generator=random)
    if size.top_k:
        ids = torch.randint(size.vocab, (len(rows), size.top_k), generator=random)
        teacher = torch.randn(len(rows), size.top_k, generator=random).log_softmax(1)
        if path == "full":
            return (full_topk_head(rows, weight, teacher, ids, temperature=size.temperature),)
        kl = linear_topk_kl(rows, weight, teacher, ids, temperature=size.temperature, chunk_bytes=size.chunk_bytes)
        return tuple(each for each in kl if each is not None)
    ids = torch.randint(size.vocab, (len(rows), size.nucleus_ids), generator=random)
    if path == "full":
        keep = torch.zeros(len(rows), size.vocab, dtype=torch.bool).scatter_(1, ids, True)
        return full_head(
            rows,
            weight,
            targets,
            temperature=size.temperature,
            entropy_gradient=size.entropy == "loss",
            with_entropy=size.entropy != "none",
            keep=keep,
        )
    row_of = torch.arange(len(rows)).repeat_interleave(size.nucleus_ids)
    base = LogProbScorer(targets, VocabShard(0, size.vocab), size.temperature, size.entropy)
    nucleus = TopPMask(ids.flatten(), row_of, torch.ones(len(rows), dtype=torch.bool))
    return score_hidden(rows, weight, None, TopPScorer(base, nucleus), chunk_bytes=size.chunk_bytes)


def measured(size: HeadSize, path: str) -> tuple[int, int, int]:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.rows, size.hidden, generator=random).requires_grad_()
    weight = torch.randn(size.vocab, size.hidden, generator=random).requires_grad_()
    with AllocationTracker() as seen:
        outputs = run(size, path, hidden, weight, random)
        forward, saved = seen.peak_bytes, seen.live_bytes
        seen.peak_bytes = seen.live_bytes
        torch.autograd.backward([each.sum() for each in outputs if each.requires_grad])
        return forward, saved, seen.peak_bytes


@pytest.mark.parametrize("path", ["full", "compact"])
@pytest.mark.parametrize(
    "changed",
    [
        {"nucleus_ids": 9},
        {"nucleus_ids": 9, "entropy": "metric", "temperature": 0.7},
        {"nucleus_ids": 9, "entropy": "none"},
        {"top_k": 16},
        {"top_k": 16, "temperature": 0.7, "kept": 512},
    ],
    ids=str,
)
def test_within_a_tenth_of_a_real_run(path: str, changed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    # The simulation cuts as for a GPU, and so must the CPU then.
    for name in ("_LEAST_WIDTH", "_WIDENED_PART"):
        monkeypatch.setattr(chunks, name, {})
    size = replace(SIZE, **changed)
    guess = simulate(size, path)  # type: ignore[arg-type]
    for name, real in zip(("forward", "saved", "backward"), measured(size, path), strict=True):
        assert abs(getattr(guess, name) - real) <= 0.1 * real, (name, getattr(guess, name), real)


def test_logits_in_the_memory_of_the_weights_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LEAST_WIDTH", "_WIDENED_PART", "_CHUNK_BYTES"):
        monkeypatch.setattr(chunks, name, {})
    for name, value in {"_CHUNK_BYTES_ELSEWHERE": 2**17, "_GOOD_WIDTH": 64, "_LEAST_WIDTH_ELSEWHERE": 64}.items():
        monkeypatch.setattr(chunks, name, value)
    budget = 3 * 2**20
    for entropy in ("none", "loss"):
        size = replace(SIZE, chunk_bytes=budget, entropy=entropy)
        guess, frozen = simulate(size, "compact"), simulate(replace(size, frozen=True), "compact")
        for name, real in zip(("forward", "saved", "backward"), measured(size, "compact"), strict=True):
            assert abs(getattr(guess, name) - real) <= 0.1 * real, (name, getattr(guess, name), real)
        # The gradient is in the budget.
        assert guess.peak <= frozen.peak + 0.1 * SIZE.vocab * SIZE.hidden * 4


def test_the_full_heads_compute_what_they_hold() -> None:
    """Their memory would be no measure if their numbers were wrong: against autograd through a dense softmax, fp64."""
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(5, 8, generator=random, dtype=torch.float64).requires_grad_()
    weight = torch.randn(13, 8, generator=random, dtype=torch.float64).requires_grad_()
    targets = torch.tensor([1, 12, 0, 3, 3])
    keep = (torch.rand(5, 13, generator=random) < 0.5).scatter_(1, targets[:, None], True)
    teacher, ids = torch.randn(5, 3, generator=random).log_softmax(1), torch.randint(13, (5, 3), generator=random)

    def gradients(*outputs: torch.Tensor) -> list[torch.Tensor]:
        total = sum((k + 1) * each.double().sum() for k, each in enumerate(outputs))
        return list(torch.autograd.grad(total, [rows], retain_graph=True))  # type: ignore[arg-type]

    logits = rows @ weight.t() / 0.7
    kept = logits.masked_fill(~keep, -torch.inf).log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1)
    kl = (teacher.exp() * (teacher - logits.log_softmax(1).gather(1, ids))).sum(1)
    ours = full_head(rows, weight, targets, temperature=0.7, entropy_gradient=True, keep=keep)
    torch.testing.assert_close(ours, (kept, entropy), check_dtype=False, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients(*ours), gradients(kept, entropy), rtol=1e-4, atol=1e-4)
    loss = full_topk_head(rows, weight, teacher, ids, temperature=0.7)
    torch.testing.assert_close(loss, kl, check_dtype=False, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients(loss), gradients(kl), rtol=1e-4, atol=1e-4)


def test_a_fused_weight_gradient_is_in_neither_path() -> None:
    weight_bytes = SIZE.vocab * SIZE.hidden * 4
    wide = replace(SIZE, hidden=4096, rows=64, kept=32)
    for path in ("full", "compact"):
        plain, fused = (simulate(replace(wide, fused=fused), path) for fused in (False, True))  # type: ignore[arg-type]
        assert plain.backward - fused.backward >= 0.9 * weight_bytes, path


def test_a_nucleus_is_not_a_mask_on_the_compact_path() -> None:
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
    assert size.shard_counts == (24, 24, 24, 24)
    assert replace(size, most_on_shard=90).shard_counts == (90, 6, 0, 0)
    assert replace(size, most_on_shard=90).of_rows(1024).shard_counts == (180, 12, 0, 0)


def test_the_most_rows_are_those_that_fit_where_a_few_more_do_not() -> None:
    size = replace(SIZE, tp=2, vocab=6016, fused=True)
    for path, budget in (("full", 3 * 10**7), ("compact", 4 * 10**6), ("compact", 3 * 10**7)):
        most = largest_fitting(size, path, budget)  # type: ignore[arg-type]
        assert most % 2 == 0
        more = most + max(2, most // 256 // 2 * 2)
        fits, not_any_more = (simulate(size.of_rows(rows), path).peak for rows in (most, more))  # type: ignore[arg-type]
        assert fits <= budget < not_any_more, path


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"nucleus_ids": 6008}, "needed 0 <= nucleus_ids <= vocab"),
        ({"top_k": -1}, "needed 0 <= nucleus_ids <= vocab and 0 <= top_k"),
        ({"top_k": 3, "nucleus_ids": 3}, "set one of them to 0"),
        ({"most_on_shard": 207}, "the fullest has from 208 to 512, got most_on_shard 207"),
    ],
)
def test_settings_that_no_head_has(changed: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        replace(SIZE, **changed)
