"""Contract 3 at 65,536 kept rows and a budget of 16 MiB: logits take the budget or one least slice; whatever else
stands grows with the rows, and not with the number of slices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from compact_logits.engine import linear
from compact_logits.engine.slices import vocab_slices
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from compact_logits.scorers.top_p import TopPMask
from tests.support.allocation import AllocationTracker
from tests.support.linear_head import SCORERS, Head

ROWS, BUDGET, K = 65_536, 16 * 2**20, 4
# Bytes a row for its statistics, ids and results: a few fp64 numbers, and for a set of ids or a teacher some of each.
SCALARS = dict.fromkeys(SCORERS, 120) | {"top_p": 300} | dict.fromkeys(("topk", "topk clamped", "tail"), 160 * K)
# What a product of 16-bit factors with an fp32 sum widens of them on a CPU, at a time.
WIDENED = 2 * 8 * 2**20

each_scorer = pytest.mark.parametrize("what", SCORERS)


def head_of(hidden: int, vocab: int, dtype: torch.dtype, device: str) -> Head:
    def tensor(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    entries = torch.arange(ROWS).repeat_interleave(3)
    return Head(
        hidden=tensor(ROWS, hidden, dtype=dtype),
        weight=tensor(vocab, hidden, dtype=dtype),
        targets=tensor(ROWS, dtype=torch.int64),
        d_log_probs=tensor(ROWS, dtype=torch.float32),
        d_entropy=tensor(ROWS, dtype=torch.float32),
        mask=TopPMask(torch.arange(3 * ROWS) * vocab // (3 * ROWS), entries, torch.ones(ROWS, dtype=torch.bool)),
        teacher_log_probs=-tensor(ROWS, K, dtype=torch.float32),
        teacher_ids=torch.arange(K, device=device).expand(ROWS, K) * (vocab // K),
    )


def peaks(head: Head, what: str, *, trained: bool = True) -> tuple[int, int, int]:
    """Most bytes in forward, those between the passes, most bytes in backward; results and gradients included."""
    hidden, weight = (each.clone().requires_grad_(trained) for each in (head.hidden, head.weight))
    with AllocationTracker() as seen, nullcontext() if trained else torch.no_grad():
        outputs = head.scored(what, hidden, weight, None, chunk_bytes=BUDGET)
        forward, saved = seen.peak_bytes, seen.live_bytes
        seen.peak_bytes = saved
        if trained:
            roots = [each for each in outputs.values() if each.requires_grad]
            torch.autograd.backward(roots, [torch.ones_like(each) for each in roots])
    return forward, saved, seen.peak_bytes


def check(head: Head, what: str, *, trained: bool = True) -> None:
    (vocab, hidden), itemsize = head.weight.shape, head.hidden.element_size()
    slices = vocab_slices(ROWS, vocab, hidden, head.hidden.dtype, head.hidden.device, BUDGET)
    logits = slices.peak_logits(keep=trained) * itemsize
    assert logits <= max(BUDGET, ROWS * hidden * itemsize // 4)
    forward, saved, backward = peaks(head, what, trained=trained)
    scalars = ROWS * SCALARS[what]
    assert forward <= logits + scalars, "forward"
    assert saved <= (logits if trained else 0) + scalars, "between the passes"
    if trained:
        gradients = ROWS * hidden * (itemsize + 4) + head.weight.nbytes
        assert backward <= logits + gradients + scalars + WIDENED * (not head.hidden.is_meta), "backward"


@each_scorer
@pytest.mark.parametrize("trained", [True, False])
def test_a_head_of_a_real_size(what: str, trained: bool) -> None:
    check(head_of(1024, 32_768, torch.bfloat16, "meta"), what, trained=trained)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("what", ["loss", "tail"])
@pytest.mark.parametrize("trained", [True, False])
def test_case_1_1_a_head_that_runs(what: str, dtype: torch.dtype, trained: bool) -> None:
    check(head_of(32, 512, dtype, "cpu"), what, trained=trained)


@each_scorer
def test_case_1_6_nothing_grows_with_the_number_of_slices(what: str) -> None:
    few, many = (head_of(1024, vocab, torch.bfloat16, "meta") for vocab in (4096, 32_768))
    of_few, of_many = (peaks(head, what) for head in (few, many))
    more = many.weight.nbytes - few.weight.nbytes
    assert of_many[:2] == pytest.approx(of_few[:2], rel=0.01)
    assert of_many[2] - of_few[2] == pytest.approx(more, rel=0.01)


@contextmanager
def all_slices_are_saved() -> Iterator[None]:
    def slices_of(*given: Any) -> Any:
        slices = right(*given)
        return replace(slices, saved=len(slices))

    right = linear.slices_of
    with mock.patch.object(linear, "slices_of", slices_of):
        yield


@contextmanager
def statistics_are_stacked() -> Iterator[None]:
    def add_slice_(self: LogProbScorer, stats: tuple[Tensor, ...], logits: Tensor, first: int) -> None:
        stacked.append(stats[0].clone())
        right(self, stats, logits, first)

    stacked: list[Tensor] = []
    right = LogProbScorer.add_slice_
    with mock.patch.object(LogProbScorer, "add_slice_", add_slice_):
        yield


@contextmanager
def a_slice_is_copied() -> Iterator[None]:
    right = linear.project
    with mock.patch.object(linear, "project", lambda *given: right(*given).float().to(given[-1])):
        yield


@pytest.mark.parametrize("fault", [all_slices_are_saved, statistics_are_stacked, a_slice_is_copied])
def test_what_the_bound_is_there_to_catch(fault: Any) -> None:
    with fault(), pytest.raises(AssertionError, match="forward"):
        check(head_of(1024, 32_768, torch.bfloat16, "meta"), "loss")
