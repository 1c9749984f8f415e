"""Logits that wait for backward in the memory that the weight's gradient takes: none is lost, and the peak falls."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compact_logits import chunks, linear_log_probs, projection
from compact_logits.engine.slices import ChunkPlan, plan_chunks
from compact_logits.held_logits import HeldLogits, lending_pays
from compact_logits.engine.weight_grad import ReturnedWeightGrad
from tests.support.allocation import AllocationTracker
from tests.support.linear_head import Head, assert_as_good_as_plain

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CPU = torch.device("cpu")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few columns, so that heads of a test's size have as many as real ones."""
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", {"cpu": 1})
    monkeypatch.setattr(chunks, "_GOOD_WIDTH", 4)
    monkeypatch.setattr(chunks, "_LEAST_WIDTH", {"cpu": 4})


def overwritten(held: HeldLogits, hidden: int) -> list[int]:
    """The slices whose logits were gone when backward came to them, or went while their products were formed."""
    plan, gone = held.plan, []
    slices = plan.slices()
    for index, columns in enumerate(slices):
        held.chunk(index, plan.rows, columns.stop - columns.start).fill_(index)
    for index in held.order:
        columns = slices[index]
        logits = held.chunk(index, plan.rows, columns.stop - columns.start)
        if not held.stays(index):
            logits.fill_(index)
        lost = not bool((logits == index).all())
        logits = held.apart(index, logits)
        if held.lent is not None:
            held.lent[columns] = -1  # the gradient
        if lost or not bool((logits == index).all()):
            gone.append(index)
    assert held.lent is None or bool((held.lent == -1).all())
    return gone


sizes = {
    "rows": st.integers(1, 12),
    "columns": st.integers(1, 40),
    "hidden": st.integers(1, 9),
    "width": st.integers(1, 12),
    "held": st.integers(1, 50),
}


def held_logits(rows: int, columns: int, hidden: int, width: int, held: int, *, lends: bool) -> HeldLogits:
    plan = ChunkPlan(rows, columns, height=rows, width=min(width, columns), held=held, block=1)
    weight, like = (torch.empty(size, hidden, dtype=torch.int64) for size in (columns, rows))
    return HeldLogits.make(plan, like, weight, torch.int64, keep=True, lends=lends)


@given(**sizes, lends=st.booleans())
def test_no_logits_are_overwritten_before_they_are_read(lends: bool, hidden: int, **size: int) -> None:
    held = held_logits(hidden=hidden, lends=lends, **size)
    slices = len(held.plan.slices())
    assert sorted(held.order) == list(range(slices))
    assert overwritten(held, hidden) == []
    lent = 0 if held.lent is None else held.lent.numel()
    whole = slices * held.plan.height * held.plan.width
    assert held.own.numel() + lent <= held.plan.held * held.plan.height * held.plan.width
    staying = sum(held.stays(index) for index in range(slices))
    # One place is for what is formed again, and what is left of the gradient's memory is none.
    assert staying >= min(held.plan.held, slices) - (2 if lent else 0)
    # A gradient that holds more than the logits is not made early, nor one that holds next to none.
    assert lent == 0 or 2 * held.plan.height * held.plan.width <= lent <= whole


def test_the_check_above_finds_logits_that_are_overwritten() -> None:
    size = {"rows": 6, "columns": 40, "hidden": 3, "width": 4, "held": 8}
    held = held_logits(lends=True, **size)
    assert held.lent is not None and overwritten(held, 3) == []
    with mock.patch.object(HeldLogits, "order", property(lambda self: [*reversed(range(10))])):
        assert overwritten(held, 3)
    with mock.patch.object(HeldLogits, "apart", lambda self, index, logits: logits):
        assert overwritten(held, 3) == [0]
    right = HeldLogits.chunk

    def crowded(self: HeldLogits, index: int, rows: int, columns: int) -> torch.Tensor:
        if self.lent is None or index >= self._lent_places:
            return right(self, index, rows, columns)
        first = index * self._chunk // 2
        return self.lent.view(-1)[first : first + rows * columns].view(rows, columns)

    with mock.patch.object(HeldLogits, "chunk", crowded):
        assert overwritten(held, 3)


@pytest.mark.parametrize("hidden", [3, 30])
@pytest.mark.parametrize("columns", [33, 37, 40])
def test_where_all_slices_stay_no_more_is_taken_than_logits(columns: int, hidden: int) -> None:
    held = held_logits(rows=6, columns=columns, hidden=hidden, width=8, held=50, lends=True)
    assert (held.lent is None) == (hidden == 30)
    # Beside lent memory, one place more is for what is formed apart.
    elsewhere = 0 if held.lent is None else (held.lent.numel() // 48 - 1) * 48
    assert held.own.numel() == 6 * columns - elsewhere


def test_lent_is_only_what_the_gradient_will_take() -> None:
    plan = ChunkPlan(rows=8, columns=40, height=8, width=4, held=6, block=1)
    weight = torch.empty(40, 3)
    assert lending_pays(plan, weight, torch.float32)
    assert not lending_pays(plan, weight, torch.bfloat16), "logits of another dtype than the gradient"
    assert not lending_pays(ChunkPlan(16, 40, height=8, width=4, held=6, block=1), weight, torch.float32), "a sum"
    assert not lending_pays(ChunkPlan(0, 40, height=1, width=40, held=6, block=1), weight, torch.float32)
    rows = torch.empty(8, 3)
    for wish in ({"keep": False, "lends": True}, {"keep": True, "lends": False}):
        assert HeldLogits.make(plan, rows, weight, torch.float32, **wish).lent is None


HEAD: dict[str, Any] = {"rows": 60, "hidden": 7, "vocab": 301}


def budget_of(dtype: torch.dtype, part: float) -> int:
    return int(part * HEAD["rows"] * HEAD["vocab"] * dtype.itemsize)


@each_dtype
@pytest.mark.parametrize("part", [0.5, 0.8, 3.0])
@pytest.mark.usefixtures("small_chunks")
def test_values_and_gradients(part: float, dtype: torch.dtype) -> None:
    head = Head.random(*HEAD.values(), dtype, bias=True, temperature="rows")
    budget = budget_of(dtype, part)
    plan = plan_chunks(HEAD["rows"], HEAD["vocab"], dtype, CPU, budget)
    if part < 1 or dtype in (torch.float32, torch.float64):
        assert lending_pays(plan, head.weight, dtype)
    made = []
    with mock.patch.object(HeldLogits, "make", side_effect=HeldLogits.make) as make:
        make.side_effect = lambda *args, make=make.side_effect, **kwargs: made.append(make(*args, **kwargs)) or made[-1]
        ours = head.compact("loss", chunk_bytes=budget)
    assert (made[0].lent is not None) == lending_pays(plan, head.weight, dtype)
    floor = 1e-12 if dtype == torch.float64 else 1e-6
    assert_as_good_as_plain(ours, head.plain("loss"), head.truth("loss"), floor=floor)


def leaves(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(7)
    hidden = torch.randn(HEAD["rows"], HEAD["hidden"], generator=random).to(dtype).requires_grad_()
    weight = torch.randn(HEAD["vocab"], HEAD["hidden"], generator=random).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(HEAD["vocab"], (HEAD["rows"],), generator=random)


@each_dtype
@pytest.mark.usefixtures("small_chunks")
def test_a_second_backward_finds_the_memory_given_away_and_leaves_it(dtype: torch.dtype) -> None:
    hidden, weight, targets = leaves(dtype)
    loss = linear_log_probs(hidden, weight, targets, chunk_bytes=budget_of(dtype, 0.7)).log_probs.sum()
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    as_they_were = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(loss, [hidden, weight])
    for one, before, two in zip(first, as_they_were, second, strict=True):
        assert torch.equal(one, before) and one.data_ptr() != two.data_ptr()
        torch.testing.assert_close(one, two)
    whole = linear_log_probs(hidden, weight, targets).log_probs.sum()
    torch.testing.assert_close(second, torch.autograd.grad(whole, [hidden, weight]))


@pytest.mark.usefixtures("small_chunks")
def test_gradients_of_several_micro_batches_add_up() -> None:
    """The first becomes `weight.grad` with the memory that logits stood in; others are under way then, and follow."""
    hidden, weight, targets = leaves(torch.float32)
    budget = budget_of(torch.float32, 0.7)
    losses = [
        linear_log_probs(part * hidden, weight, targets, chunk_bytes=budget).log_probs.sum() for part in (1, 2, 3)
    ]
    for loss in losses:
        loss.backward()
    plain = [torch.log_softmax(part * hidden @ weight.t(), 1).gather(1, targets[:, None]).sum() for part in (1, 2, 3)]
    expected = torch.autograd.grad(sum(plain), [hidden, weight])
    torch.testing.assert_close((hidden.grad, weight.grad), expected, rtol=1e-4, atol=1e-4)
    assert weight.grad is not None and weight.grad.untyped_storage().nbytes() == weight.nbytes


@pytest.mark.usefixtures("small_chunks")
def test_saved_tensors_that_were_moved_away_and_back() -> None:
    hidden, weight, targets = leaves(torch.float32)
    results = []
    for hooks in ((lambda t: t, lambda t: t), (lambda t: t.detach().numpy().copy(), torch.from_numpy)):
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            result = linear_log_probs(hidden, weight, targets, chunk_bytes=budget_of(torch.float32, 0.7))
        results.append(torch.autograd.grad(result.log_probs.sum(), [hidden, weight]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("small_chunks")
def test_a_hook_s_memory_is_not_given_away() -> None:
    """An offloader brings saved tensors back into memory that it uses again, in whatever strides."""
    hidden, weight, targets = leaves(torch.float32)
    staging, used = torch.empty(10**6), 0

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        nonlocal used
        if saved.dtype != torch.float32:
            return saved
        start, used = used, used + saved.numel()
        turned = saved.t() if saved.dim() == 2 else saved
        return staging[start:used].view(turned.shape).copy_(turned).t()

    expected = None
    for hooks in ((lambda t: t, lambda t: t), (lambda t: t.detach().clone(), unpack)):
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            result = linear_log_probs(hidden, weight, targets, chunk_bytes=budget_of(torch.float32, 0.7))
        gradients = torch.autograd.grad(result.log_probs.sum(), [hidden, weight])
        staging.fill_(7)
        expected = expected or gradients
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other)
            assert one.untyped_storage().nbytes() == one.nbytes
    assert 0 < used <= staging.numel()


@pytest.mark.usefixtures("small_chunks")
def test_all_backwards_add_in_the_same_order() -> None:
    random = torch.Generator().manual_seed(5)
    hidden = torch.randn(20, 6, generator=random, dtype=torch.float64).requires_grad_()
    weight = torch.randn(40, 6, generator=random, dtype=torch.float64).requires_grad_()
    targets = torch.randint(40, (20,), generator=random)

    def score(*inputs: torch.Tensor) -> torch.Tensor:
        return linear_log_probs(*inputs, targets, chunk_bytes=int(0.8 * 20 * 40 * 8)).log_probs

    made = []
    with mock.patch.object(HeldLogits, "make", side_effect=HeldLogits.make) as make:
        make.side_effect = lambda *args, make=make.side_effect, **kwargs: made.append(make(*args, **kwargs)) or made[-1]
        loss = score(hidden, weight).sum()
    assert made[0].lent is not None
    of_backwards = [torch.autograd.grad(loss, [hidden, weight], retain_graph=True) for _ in range(3)]
    for other in of_backwards[1:]:
        assert all(map(torch.equal, of_backwards[0], other))
    assert torch.autograd.gradcheck(score, (hidden, weight))


@pytest.mark.parametrize("part", [0.3, 0.7])  # without lent memory, and with it
def test_threads_that_share_a_graph(part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", {"cpu": 2**18})
    random = torch.Generator().manual_seed(6)
    hidden = torch.randn(256, 64, generator=random).requires_grad_()
    weight = torch.randn(2048, 64, generator=random).requires_grad_()
    targets = torch.randint(2048, (256,), generator=random)
    loss = linear_log_probs(hidden, weight, targets, chunk_bytes=int(part * 256 * 2048 * 4)).log_probs.sum()
    together = threading.Barrier(2)

    def backward(_: int) -> tuple[torch.Tensor, ...]:
        together.wait(timeout=60)
        return torch.autograd.grad(loss, [hidden, weight], retain_graph=True)

    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            first, second = pool.map(backward, range(2))
            torch.testing.assert_close(first, second)
            plain = torch.log_softmax(hidden @ weight.t(), 1).gather(1, targets[:, None]).sum()
            torch.testing.assert_close(first, torch.autograd.grad(plain, [hidden, weight]), rtol=1e-4, atol=1e-4)


@each_dtype
def test_the_peak_is_the_budget_with_the_weights_gradient_in_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", {"cpu": 2**15})
    random = torch.Generator().manual_seed(3)
    rows, width, vocab = 1200, 96, 2000
    hidden = torch.randn(rows, width, generator=random).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=random).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (rows,), generator=random)
    budget = rows * vocab * dtype.itemsize // 2
    # Beside logits: rows and their gradient, its sum in fp32, and a few numbers a row.
    besides = rows * width * (2 * dtype.itemsize + 4) + rows * 8 * 24

    def peak(lends: bool) -> tuple[int, int]:
        monkeypatch.setattr(projection, "ReturnedWeightGrad", lambda: ReturnedWeightGrad(lends=lends))
        with AllocationTracker() as seen:
            result = linear_log_probs(hidden, weight, targets, chunk_bytes=budget)
            saved = seen.live_bytes
            torch.autograd.grad(result.log_probs.sum(), [hidden, weight])
        return saved, seen.peak_bytes

    (saved, lent), (kept, apart) = peak(True), peak(False)
    assert saved <= budget + besides and lent <= budget + besides
    assert kept <= budget + besides and apart >= 0.9 * (budget + weight.nbytes)
