"""What the head holds and saves: bounded by the budget, whatever the number of rows. `test_logits_bound` counts rows of
logits; here it is bytes, dtypes, and what is saved for backward."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from compact_logits import linear_log_probs, log_probs
from compact_logits.engine.slices import plan_blocks, plan_chunks
from compact_logits.hidden_grad import HiddenGrad
from tests.support.allocation import AllocationTracker
from tests.support.linear_head import Head

VOCAB, HIDDEN, ROWS = 2053, 24, 400
BUDGET = 2**19
UNLIMITED = 2**30
# Bytes a row costs besides its hidden state: what is saved of it, and what stands while its results are formed.
SAVED, SCALARS = 16, 256

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
each_entropy = pytest.mark.parametrize("entropy", ["none", "metric", "loss"])


def leaves(dtype: torch.dtype, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    head = Head.random(rows, HIDDEN, VOCAB, dtype, bias=True)
    return head.hidden.requires_grad_(), head.weight.requires_grad_(), head.bias.requires_grad_(), head.targets


def saved_bytes(score: Callable[[], object], given: tuple[Tensor, ...]) -> int:
    """Bytes of the storages saved for backward, but for those of `given`."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        keep = score()
    assert keep is not None
    known = {tensor.untyped_storage().data_ptr() for tensor in given}
    assert known & storages.keys(), "nothing given was saved, so the hooks saw nothing"
    return sum(size for pointer, size in storages.items() if pointer not in known)


@each_dtype
@each_entropy
def test_case_1_9_saved_are_the_rows_scalars_and_what_the_budget_lets_stay(dtype: torch.dtype, entropy: str) -> None:
    hidden, weight, bias, targets = leaves(dtype)

    def saved(chunk_bytes: int) -> int:
        def score() -> object:
            return linear_log_probs(hidden, weight, targets, bias=bias, entropy=entropy, chunk_bytes=chunk_bytes)

        return saved_bytes(score, (hidden, weight, bias, targets))

    row = VOCAB * dtype.itemsize
    assert saved(1) <= row + 2 * VOCAB * 4 + SAVED * ROWS
    assert saved(BUDGET) <= BUDGET + SAVED * ROWS
    # Without a limit one chunk is all rows, and stays.
    assert saved(UNLIMITED) >= ROWS * row > BUDGET


@each_dtype
def test_case_1_9_the_plain_path_saves_what_we_do_not(dtype: torch.dtype) -> None:
    """So that the bound above is known to tell the two apart."""
    hidden, weight, bias, targets = leaves(dtype)

    def score() -> object:
        logits = torch.nn.functional.linear(hidden, weight, bias).float()
        return torch.log_softmax(logits, dim=1).gather(1, targets[:, None])

    assert saved_bytes(score, (hidden, weight, bias, targets)) >= ROWS * VOCAB * 4 > BUDGET


@each_dtype
@each_entropy
def test_case_1_7_and_1_11_given_logits_are_widened_a_block_at_a_time(dtype: torch.dtype, entropy: str) -> None:
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (ROWS,))
    block = plan_blocks(ROWS, VOCAB, dtype, torch.device("cpu"), BUDGET).block

    def passes(chunk_bytes: int) -> tuple[AllocationTracker, AllocationTracker]:
        with AllocationTracker() as forward:
            result = log_probs(logits, targets, entropy=entropy, chunk_bytes=chunk_bytes)
        with AllocationTracker() as backward:
            result.log_probs.sum().backward()
        return forward, backward

    forward, backward = passes(BUDGET)
    assert 0 < forward.largest_rows(VOCAB) <= block
    whole = {a.storage for a in backward.records if a.shape[-1:] == (VOCAB,) and a.nbytes > block * VOCAB * 4}
    assert len(whole) == 1, "the gradient and nothing else has all rows"
    wide = {a.dtype for tracker in (forward, backward) for a in tracker.records if a.shape[-1:] == (VOCAB,)}
    assert wide <= {dtype, torch.float32}
    assert passes(UNLIMITED)[0].largest_rows(VOCAB) > block
    assert saved_bytes(lambda: log_probs(logits, targets, entropy=entropy), (logits, targets)) <= SAVED * ROWS


@each_dtype
def test_case_1_10_backward_holds_one_copy_of_each_gradient(dtype: torch.dtype) -> None:
    rows, hidden_size, vocab = 2048, 128, 33
    head = Head.random(rows, hidden_size, vocab, dtype)
    hidden, weight = head.hidden.requires_grad_(), head.weight.requires_grad_()
    budget = dtype.itemsize * vocab * rows // 15
    chunks = plan_chunks(rows, vocab, dtype, torch.device("cpu"), budget).groups()
    assert 8 <= len(chunks) <= 24
    result = linear_log_probs(hidden, weight, head.targets, chunk_bytes=budget)
    incoming = torch.ones(rows)
    with AllocationTracker() as tracker:
        result.log_probs.backward(incoming)
    gradients = hidden.grad.nbytes + weight.grad.nbytes
    assert gradients <= tracker.peak_bytes < 1.6 * gradients
    # What it is there to catch: the chunks' gradients in a list, then joined.
    with AllocationTracker() as tracker:
        parts = [torch.ones(chunk.stop - chunk.start, hidden_size, dtype=dtype) for chunk in chunks]
        torch.cat(parts)
    assert tracker.peak_bytes > 1.6 * gradients


@pytest.mark.parametrize("chunk_bytes", [BUDGET, UNLIMITED])
def test_case_1_11_few_rows_take_one_pass(chunk_bytes: int) -> None:
    rows = 20
    plan = plan_chunks(rows, VOCAB, torch.float32, torch.device("cpu"), chunk_bytes)
    assert len(plan.groups()) == len(plan.slices()) == 1
    hidden, weight, bias, targets = leaves(torch.float32, rows)
    with AllocationTracker() as tracker:
        linear_log_probs(hidden, weight, targets, bias=bias, chunk_bytes=chunk_bytes).log_probs.sum().backward()
    products = [a for a in tracker.records if a.op.startswith(("aten.mm", "aten.addmm"))]
    assert len(products) == 3, "the logits and two gradients: nothing is formed a second time"


@each_dtype
def test_the_budget_holds_without_gradients_too(dtype: torch.dtype) -> None:
    hidden, weight, bias, targets = leaves(dtype)

    def peak(chunk_bytes: int) -> int:
        with torch.no_grad(), AllocationTracker() as tracker:
            linear_log_probs(hidden, weight, targets, bias=bias, entropy="metric", chunk_bytes=chunk_bytes)
        return tracker.peak_bytes

    assert peak(BUDGET) <= BUDGET + SCALARS * ROWS
    assert peak(1) <= 2 * VOCAB * (dtype.itemsize + 4) + SCALARS * ROWS
    assert peak(UNLIMITED) > BUDGET + SCALARS * ROWS


def test_case_3_8_no_gradient_is_formed_for_a_frozen_head() -> None:
    hidden, weight, bias, targets = leaves(torch.float32)
    result = linear_log_probs(hidden, weight.detach(), targets, bias=bias.detach(), chunk_bytes=BUDGET)
    with AllocationTracker() as tracker:
        result.log_probs.sum().backward()
    shapes = {record.shape for record in tracker.records}
    assert (VOCAB, HIDDEN) not in shapes and (HIDDEN, VOCAB) not in shapes and (VOCAB,) not in shapes
    assert (ROWS, HIDDEN) in shapes


@each_dtype
@pytest.mark.parametrize("chunk_bytes", [BUDGET, UNLIMITED])
def test_backward_writes_over_the_logits_that_forward_left(chunk_bytes: int, dtype: torch.dtype) -> None:
    rows = 3000
    hidden, weight, bias, targets = leaves(dtype, rows)
    plan = plan_chunks(rows, VOCAB, dtype, torch.device("cpu"), chunk_bytes)
    assert plan.height > 2 * plan.block
    result = linear_log_probs(hidden, weight, targets, bias=bias, entropy="loss", chunk_bytes=chunk_bytes)
    with AllocationTracker() as tracker:
        (result.log_probs.sum() + result.entropy.sum()).backward(retain_graph=True)
    buffers = [each for each in tracker.records if "empty" in each.op and each.shape[1:] == (plan.width,)]
    assert max((each.nbytes for each in buffers), default=0) <= 4 * plan.block * plan.width
    # They are spent then. Where backward took them to be logits still, its second gradient would be another.
    first = hidden.grad.clone()
    (result.log_probs.sum() + result.entropy.sum()).backward()
    assert torch.equal(hidden.grad, 2 * first)


def test_a_backward_that_fails_leaves_no_buffers() -> None:
    hidden, weight, bias, targets = leaves(torch.bfloat16)
    with AllocationTracker() as tracker:
        result = linear_log_probs(hidden, weight, targets, bias=bias, chunk_bytes=1)
        before = tracker.live_bytes
        with pytest.raises(ArithmeticError), mock.patch.object(HiddenGrad, "add", fails_the_second_time([])):
            result.log_probs.sum().backward()
        gc.collect()
        assert tracker.live_bytes <= before
        result.log_probs.sum().backward()
    assert torch.isfinite(weight.grad).all()


def fails_the_second_time(calls: list[int]) -> Callable[..., None]:
    right = HiddenGrad.add

    def add(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:  # the first chunk's part of the weight's gradient stands by then
            raise ArithmeticError
        right(*args)

    return add
