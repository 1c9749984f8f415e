"""`compute_logprobs` over plain and sharded logits: values and gradients against dense truth."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from compact_logits.errors import InputError
from compact_logits.integrations.torchforge import compute_logprobs, compute_logprobs_from_hidden
from compact_logits.integrations.torchforge.targets import warn_of_compile
from tests.support.allocation import AllocationTracker
from tests.support.collectives import count_collectives
from tests.support.meshes import cut, mesh_of
from tests.support.parity import assert_close_to_truth, assert_gradient_close_to_truth
from tests.support.ranks import RankPool
from tests.support.torchforge_plain import plain_logprobs

BATCH, POSITIONS, RESPONSE = 3, 7, 4


def inputs(vocab: int, dtype: torch.dtype, align: bool = True, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, ids and the gradient that comes back, alike on every rank."""
    torch.manual_seed(vocab)
    width = RESPONSE if align else POSITIONS
    logits = (torch.randn(BATCH, POSITIONS, vocab) * scale).to(dtype)
    return logits, torch.randint(0, vocab, (BATCH, width)), torch.randn(BATCH, width)


def plain_results(
    logits: Tensor, ids: Tensor, upstream: Tensor, temperature: float, align: bool
) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    values = plain_logprobs(leaf, ids, temperature, align)
    values.backward(upstream.to(values.dtype))
    assert leaf.grad is not None
    return values.detach(), leaf.grad


def agree(
    values: Tensor, grad: Tensor, logits: Tensor, ids: Tensor, upstream: Tensor, temperature: float, align: bool
) -> None:
    """Ours within 1e-5 of fp64 truth, and no further from it than the plain path of the same dtype, for both."""
    plain, plain_grad = plain_results(logits, ids, upstream, temperature, align)
    truth, truth_grad = plain_results(logits.double(), ids, upstream, temperature, align)
    assert_close_to_truth(values, plain, truth, name="log-prob")
    # At the scale of a value of thousands, fp32 itself ends before 1e-5.
    torch.testing.assert_close(values.double(), truth, atol=1e-5, rtol=1e-6)
    limit = 1e-5 if logits.dtype == torch.float32 else None
    assert_gradient_close_to_truth(grad, plain_grad, truth_grad, limit=limit, name="d logits")


def test_the_signature_is_torchforges() -> None:
    first = list(inspect.signature(compute_logprobs).parameters.values())[:4]
    assert [each.name for each in first] == ["logits", "input_ids", "temperature", "align"]
    assert [each.default for each in first[2:]] == [1.0, True]
    assert all(each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for each in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_case_6_7_plain_logits(dtype: torch.dtype, align: bool, temperature: float) -> None:
    logits, ids, upstream = inputs(13, dtype, align)
    before = logits.clone()
    leaf = logits.requires_grad_()
    values = compute_logprobs(leaf, ids, temperature, align)
    assert values.dtype == torch.float32 and values.shape == ids.shape
    values.backward(upstream)
    assert torch.equal(logits.detach(), before) and leaf.grad is not None and leaf.grad.dtype == dtype
    agree(values.detach(), leaf.grad, before, ids, upstream, temperature, align)


def test_values_without_grad_and_in_inference_mode_are_those_of_training() -> None:
    logits, ids, _ = inputs(13, torch.bfloat16)
    trained = compute_logprobs(logits.clone().requires_grad_(), ids)
    assert trained.requires_grad
    with torch.inference_mode():
        made_inside = compute_logprobs(logits.clone(), ids)
    with torch.inference_mode():
        inference_logits = logits.clone()
    used_outside = compute_logprobs(inference_logits, ids)
    for values in (made_inside, used_outside):
        assert not values.requires_grad and torch.equal(values, trained)


def test_logits_that_are_a_transposed_view_are_not_copied() -> None:
    base = torch.randn(64, 4, 4096)
    ids = torch.randint(0, 4096, (4, 20))
    with AllocationTracker() as seen:
        values = compute_logprobs(base.transpose(0, 1), ids, chunk_bytes=2**20)
    torch.testing.assert_close(values, plain_logprobs(base.transpose(0, 1), ids))
    assert seen.largest_rows(4096) < 20
    with AllocationTracker() as full:
        plain_logprobs(base.transpose(0, 1), ids)
    assert full.largest_rows(4096) >= 80


def test_an_ignored_id_gives_zero_and_no_gradient() -> None:
    logits, ids, _ = inputs(13, torch.float32)
    ids[1, 2] = -100
    leaf, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    compute_logprobs(leaf, ids).sum().backward()
    plain_logprobs(plain, ids).sum().backward()
    assert compute_logprobs(leaf, ids)[1, 2].item() == 0.0
    assert leaf.grad is not None and plain.grad is not None
    assert leaf.grad[1, 4].abs().max().item() == 0.0
    torch.testing.assert_close(leaf.grad, plain.grad)


@pytest.fixture
def warnings_of_compile(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Each test begins as a process does that has not been warned."""
    warn_of_compile.cache_clear()
    yield lambda: [record.message for record in caplog.records if "compile" in record.message]
    warn_of_compile.cache_clear()


def test_compile_does_nothing_and_warns_once(warnings_of_compile: Callable[[], list[str]]) -> None:
    logits, ids, _ = inputs(13, torch.float32)
    hidden, weight = torch.randn(BATCH, POSITIONS, 6), torch.randn(13, 6)
    plain = compute_logprobs(logits, ids), compute_logprobs_from_hidden(hidden, weight, ids)
    assert warnings_of_compile() == []
    for _ in range(2):
        assert torch.equal(compute_logprobs(logits, ids, compile=True), plain[0])
        assert torch.equal(compute_logprobs_from_hidden(hidden, weight, ids, compile=True), plain[1])
    assert len(warnings_of_compile()) == 1 and "does nothing in this release" in warnings_of_compile()[0]


def test_a_compiled_loss_calls_it() -> None:
    """torchforge compiles its losses: around the call, which is no part of their graphs."""

    def eager_loss(log_probs: Tensor, advantages: Tensor) -> Tensor:
        return -(torch.exp(log_probs - log_probs.detach()) * advantages).sum(dim=1).mean()

    @torch.compile
    def loss(logits: Tensor, ids: Tensor, advantages: Tensor) -> Tensor:
        return eager_loss(compute_logprobs(logits, ids), advantages)

    for rows in (6, 8, 12):
        logits, ids, advantages = torch.randn(2, rows + 1, 13), torch.randint(0, 13, (2, rows)), torch.randn(2, 1)
        leaf, plain = logits.requires_grad_(), logits.detach().clone().requires_grad_()
        ours, expected = loss(leaf, ids, advantages), eager_loss(plain_logprobs(plain, ids), advantages)
        ours.backward()
        expected.backward()
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(leaf.grad, plain.grad, atol=1e-6, rtol=1e-5)


def test_golden_values_of_extreme_logits() -> None:
    logits = torch.tensor([[[10000.0, 9999.0, 9998.0]]]).requires_grad_()
    values = compute_logprobs(logits, torch.tensor([[1]]), align=False)
    assert values.item() == pytest.approx(-1.4076060, abs=1e-6)
    values.sum().backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


@pytest.mark.parametrize(
    ("shape", "ids", "align", "text"),
    [
        ((2, 5), torch.zeros(2, 3, dtype=torch.int64), True, "needed logits (batch, positions, vocab)"),
        ((2, 3, 5), torch.zeros(2, 3, dtype=torch.int64), True, "align=True needs at least 4, one before each id"),
        ((2, 4, 5), torch.zeros(2, 3, dtype=torch.int64), False, "align=False needs as many of each"),
        ((2, 4, 5), torch.zeros(3, 3, dtype=torch.int64), True, "2 sequences on this rank and input_ids 3"),
        ((2, 4, 5), torch.zeros(2, 3), True, "needed integer input_ids"),
        ((2, 4, 5), torch.zeros(2, 3, dtype=torch.bool), True, "needed integer input_ids"),
        ((2, 4, 5), [[0, 1, 2]], True, "needed a tensor as input_ids, got '[[0, 1, 2]]' of list"),
        ((2, 4, 5), torch.full((2, 3), 5), True, "must be below the vocabulary size 5, got 5"),
        ((2, 4, 5), torch.full((2, 3), -1), True, "must be vocabulary ids, got -1"),
    ],
)
def test_what_does_not_fit_is_refused(shape: tuple[int, ...], ids: Tensor, align: bool, text: str) -> None:
    with pytest.raises(InputError) as error:
        compute_logprobs(torch.zeros(shape), ids, align=align)
    assert text in str(error.value)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_divides_nothing_is_refused(temperature: float) -> None:
    with pytest.raises(InputError, match="temperature must be positive and finite"):
        compute_logprobs(torch.zeros(1, 2, 3), torch.zeros(1, 1, dtype=torch.int64), temperature)


def sharded(
    rank: int,
    world: int,
    vocab: int,
    dtype: torch.dtype,
    align: bool,
    temperature: float = 0.7,
    scale: float = 3.0,
) -> dict[str, int]:
    """One mesh axis over the vocabulary; plain ids give a plain result, the gradient is a DTensor as the logits are."""
    logits, ids, upstream = inputs(vocab, dtype, align, scale)
    leaf = cut(logits, mesh_of(world), [Shard(2)], grad=True)
    with count_collectives() as forward:
        values = compute_logprobs(leaf, ids, temperature, align, check_ranks=True)
    assert type(values) is Tensor and values.dtype == torch.float32
    with count_collectives() as backward:
        values.backward(upstream)
    grad = leaf.grad
    assert isinstance(grad, DTensor) and grad.placements == leaf.placements and grad.dtype == dtype
    assert grad.to_local().shape == leaf.to_local().shape
    agree(values.detach(), grad.full_tensor(), logits, ids, upstream, temperature, align)
    without_grad = leaf.detach()
    with torch.inference_mode():
        assert torch.equal(compute_logprobs(without_grad, ids, temperature, align), values)
    return {**{f"forward {k}": v for k, v in forward.items()}, **{f"backward {k}": v for k, v in backward.items()}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize(("world", "vocab"), [(2, 12), (2, 13), (2, 1), (4, 13), (4, 5)])
def test_case_6_4_logits_sharded_on_the_vocabulary(
    rank_pool: RankPool, world: int, vocab: int, dtype: torch.dtype, align: bool
) -> None:
    for counts in rank_pool.run(world, sharded, vocab, dtype, align):
        assert counts == {"forward all_gather_into_tensor": 2}


@pytest.mark.parametrize("world", [2, 4])
def test_extreme_logits_are_exact(rank_pool: RankPool, world: int) -> None:
    rank_pool.run(world, sharded, 13, torch.float32, True, 1.0, 1e4)
