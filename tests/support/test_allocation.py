"""The allocation tracker sees what comes into being, in forward and in backward, and only that."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.allocation import AllocationTracker

ROWS, HIDDEN, VOCAB = 6, 4, 32


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        scratch = grad.new_empty(ROWS, VOCAB)
        return grad * 2 + scratch.zero_().sum()


def test_records_shape_dtype_bytes_and_one_storage_for_its_views() -> None:
    with AllocationTracker() as tracker:
        x = torch.zeros(3, 5, dtype=torch.bfloat16)
        x.t()
    assert [(a.shape, a.dtype, a.nbytes) for a in tracker.records] == [
        ((3, 5), torch.bfloat16, 30),
        ((5, 3), torch.bfloat16, 30),
    ]
    assert len({a.storage for a in tracker.records}) == 1


def test_live_and_peak_bytes_follow_the_storages() -> None:
    with AllocationTracker() as tracker:
        a = torch.zeros(100)
        view = a[10:]
        b = a + 1
        assert tracker.live_bytes == 800
        del a
        assert tracker.live_bytes == 800, "the view still holds the storage"
        del view
        assert tracker.live_bytes == 400
        c = torch.zeros(50)
        assert (tracker.live_bytes, tracker.peak_bytes) == (600, 800)
    del b, c
    assert (tracker.live_bytes, tracker.peak_bytes) == (0, 800)


def test_a_storage_that_an_operator_grows_counts_as_grown() -> None:
    with AllocationTracker() as tracker:
        out = torch.empty(0)
        torch.add(torch.ones(100), 1, out=out)
        assert tracker.live_bytes == 400
        assert tracker.peak_bytes == 800
    assert out.shape == (100,)


def test_views_of_and_writes_to_what_was_there_are_not_recorded() -> None:
    weight = torch.zeros(HIDDEN, VOCAB)
    with AllocationTracker() as tracker:
        weight.t().t()[1:].add_(1)
        weight.mul_(2)
        weight.detach()
    assert tracker.records == []
    assert tracker.peak_bytes == 0


def test_ids_of_dead_storages_do_not_hide_new_ones() -> None:
    with AllocationTracker() as tracker:
        for _ in range(50):
            torch.zeros(VOCAB)
    assert len(tracker.records) == 50
    assert (tracker.live_bytes, tracker.peak_bytes) == (0, VOCAB * 4)


def test_largest_rows_counts_flattened_rows_of_that_width() -> None:
    with AllocationTracker() as tracker:
        torch.zeros(2, 3, VOCAB)
        torch.zeros(5, VOCAB, dtype=torch.bfloat16)
        torch.zeros(VOCAB, 100)
    assert tracker.largest_rows(VOCAB) == 6
    assert tracker.largest_rows(VOCAB + 1) == 0


def test_backward_is_seen_plain_and_in_a_function_of_our_own() -> None:
    hidden = torch.randn(ROWS, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    out = Doubled.apply((hidden @ weight.t()).logsumexp(dim=-1).sum())
    with AllocationTracker() as tracker:
        out.backward()
    assert tracker.largest_rows(VOCAB) == ROWS
    assert any(a.op.startswith("aten.new_empty") for a in tracker.records)
    assert hidden.grad is not None and weight.grad is not None


def test_chunks_hold_fewer_rows_than_the_whole() -> None:
    hidden, weight = torch.randn(ROWS, HIDDEN), torch.randn(VOCAB, HIDDEN)
    with AllocationTracker() as whole:
        (hidden @ weight.t()).logsumexp(dim=-1)
    with AllocationTracker() as chunked:
        torch.cat([(rows @ weight.t()).logsumexp(dim=-1) for rows in hidden.split(2)])
    assert (whole.largest_rows(VOCAB), chunked.largest_rows(VOCAB)) == (ROWS, 2)
    assert chunked.peak_bytes < whole.peak_bytes
