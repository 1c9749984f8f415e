"""The same inputs and the same budget give the same bits: twice, on ranks, whatever ran before or is computed too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from compact_logits import linear_log_probs, log_probs, topk_kl
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from tests.support.linear_head import SCORERS, Head, Results
from tests.support.ranks import RankPool
from tests.support.sharded_head import of_rank, shard_of

ROWS, HIDDEN, VOCAB = 29, 16, 301
CUTS = [0, 130, VOCAB]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
GIVEN_LOGITS = ["logits loss", "logits tail", "logits in place"]

each_way = pytest.mark.parametrize("way", [*SCORERS, *GIVEN_LOGITS])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Where torch has no deterministic algorithm it raises; what is made without values is filled with NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def head_of(dtype: torch.dtype) -> Head:
    head = Head.random(ROWS, HIDDEN, VOCAB, dtype, bias=True, temperature="rows", k=7)
    assert head.teacher_ids is not None
    head.teacher_ids[3:9, 1] = head.teacher_ids[3:9, 0]  # listed twice
    return head


def once(head: Head, way: str, chunk_bytes: int | None, **options: Any) -> Results:
    if way in SCORERS:
        return head.compact(way, chunk_bytes=chunk_bytes, **options)
    if way != "logits in place":
        return head.with_logits(way.removeprefix("logits "), chunk_bytes=chunk_bytes, **options)
    hidden = head.hidden.clone().requires_grad_()
    teacher, mask = (head.teacher_log_probs, head.teacher_ids), torch.arange(len(hidden)) % 3 > 0
    logits = hidden @ head.weight.T
    result = topk_kl(
        logits, *teacher, tail=True, loss_mask=mask, inplace_backward=True, chunk_bytes=chunk_bytes, **options
    )
    result.loss.backward(head.d_log_probs)
    return {"loss": result.loss.detach(), "d_hidden": hidden.grad}


def differing(one: Results, other: Results) -> list[str]:
    assert one.keys() == other.keys() and len(one) > 1
    return [name for name, value in one.items() if not torch.equal(value, other[name])]  # type: ignore[arg-type]


def is_finite(results: Results) -> bool:
    return all(bool(torch.isfinite(each).all()) for each in results.values() if each is not None)


@each_way
@each_dtype
@pytest.mark.parametrize("chunk_bytes", [1, 9000, None])
def test_case_11_4_twice_the_same_bits(way: str, dtype: torch.dtype, chunk_bytes: int | None) -> None:
    head = head_of(dtype)
    first = once(head, way, chunk_bytes)
    assert is_finite(first), "memory without values was read"
    assert differing(first, once(head, way, chunk_bytes)) == []


def on_ranks(rank: int, world: int, dtype: torch.dtype) -> list[str]:
    torch.use_deterministic_algorithms(True)
    try:
        head, found = of_rank(head_of(dtype), rank, CUTS), []
        for way in (*SCORERS, *GIVEN_LOGITS):
            for chunk_bytes in (1, None):
                runs = [once(head, way, chunk_bytes, shard=shard_of(rank, CUTS)) for _ in range(2)]
                assert is_finite(runs[0]), way
                found += [f"{way}: {name}" for name in differing(*runs)]
        return found
    finally:
        torch.use_deterministic_algorithms(False)


@each_dtype
def test_ranks_twice_the_same_bits(rank_pool: RankPool, dtype: torch.dtype) -> None:
    assert rank_pool.run(2, on_ranks, dtype) == [[], []]


@each_way
def test_the_same_bits_whatever_ran_before(way: str) -> None:
    head = head_of(torch.bfloat16)
    first = once(head, way, 9000)
    for other in SCORERS:
        for dtype, chunk_bytes in ((torch.float64, 1), (torch.float32, None), (torch.bfloat16, 2000)):
            once(head_of(dtype), other, chunk_bytes)
        torch.full((ROWS * VOCAB * 4,), torch.nan)  # what the allocator gives out next
        assert differing(first, once(head, way, 9000)) == [], f"after {other}"


@each_dtype
@pytest.mark.parametrize("chunk_bytes", [1, 2**14, 2**16, None])
def test_log_probs_have_the_same_bits_whatever_else_is_asked(chunk_bytes: int | None, dtype: torch.dtype) -> None:
    """Or the ratio of a policy to itself would not be 1 where the pass before training needs no entropy."""
    head = Head.random(100, 32, 1003, dtype)
    logits = head.hidden @ head.weight.T
    for score in (partial(linear_log_probs, head.hidden, head.weight), partial(log_probs, logits)):
        score = partial(score, head.targets, chunk_bytes=chunk_bytes)
        with torch.no_grad():
            before = score().log_probs
        for given in (head.hidden, logits):
            given.requires_grad_()
        for options in ({"entropy": "none"}, {"entropy": "metric"}, {"entropy": "loss"}, {"sum_p2": True}):
            assert torch.equal(score(**options).log_probs, before), options


def test_other_bits_would_be_seen() -> None:
    runs = []
    for shaken in (0.0, 1e-7):
        head = head_of(torch.float32)
        runs.append(once(replace(head, d_log_probs=head.d_log_probs * (1 + shaken)), "loss", 1))
    assert differing(*runs) == ["d_hidden", "d_weight", "d_bias"]


def test_memory_without_values_would_be_seen() -> None:
    right = LogProbScorer.merge_ranks

    def reads_it(self: LogProbScorer, ranks: Tensor) -> Any:
        return right(self, ranks + 0.0 * torch.empty_like(ranks))

    with mock.patch.object(LogProbScorer, "merge_ranks", reads_it):
        assert not is_finite(once(head_of(torch.float32), "loss", 1))
