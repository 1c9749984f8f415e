"""`log_probs` over logits that exist: values and their gradient against fp64 truth, and logits that are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compact_logits import log_probs, reference
from tests.support.allocation import AllocationTracker
from tests.support.parity import assert_close_to_truth, assert_gradient_close_to_truth

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

each_dtype = pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64], ids=str)
each_budget = pytest.mark.parametrize("chunk_bytes", [1, 4_000, None])


def dense(logits: Tensor, targets: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """The definition over any leading shape."""
    if isinstance(temperature, Tensor):
        temperature = temperature.flatten()
    outputs = reference.log_probs(logits.reshape(-1, logits.shape[-1]), targets.flatten(), temperature=temperature)
    return outputs[0].view(targets.shape), outputs[1].view(targets.shape)


def assert_scores(logits: Tensor, targets: Tensor, chunk_bytes: int | None = None) -> None:
    """Both outputs and the gradient of `logits`, a leaf, as good as the plain path's."""
    results = []
    for given, score in (
        (logits, lambda z: tuple(log_probs(z, targets, entropy="loss", chunk_bytes=chunk_bytes))),
        (logits.detach().requires_grad_(), lambda z: dense(z, targets)),
        (logits.detach().double().requires_grad_(), lambda z: dense(z, targets)),
    ):
        outputs = score(given)
        weights = [torch.linspace(-1, 2, targets.numel()).view(targets.shape).to(o.dtype) for o in outputs]
        (gradient,) = torch.autograd.grad(outputs, given, weights)
        results.append((*(output.detach() for output in outputs), gradient))
    for name, ours, plain, truth in zip(("log_probs", "entropy"), *results, strict=False):
        assert ours.shape == targets.shape
        assert_close_to_truth(ours, plain, truth, name=name)
    assert_gradient_close_to_truth(*(result[2] for result in results))


@each_budget
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (1, 9), (300, 2), (2, 3, 7), (3, 0, 7), (2, 3, 2, 5), (9,)], ids=str)
def test_any_leading_shape(shape: tuple[int, ...], chunk_bytes: int | None) -> None:
    logits = torch.randn(shape, requires_grad=True)
    assert_scores(logits, torch.randint(0, shape[-1], shape[:-1]), chunk_bytes)


def forms() -> dict[str, Tensor]:
    """(4, 6, 11) logits by other strides than a fresh tensor has."""
    source = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    return {
        "sequence first": normal(6, 4, 11).transpose(0, 1),
        "a slice of the vocabulary": normal(4, 6, 20)[..., 3:14],
        "a window of the positions": normal(4, 9, 11)[:, 2:8],
        "vocabulary first": normal(11, 4, 6).permute(1, 2, 0),
        "every second": normal(8, 12, 22)[::2, ::2, ::2],
        "one row for all": normal(1, 1, 11).expand(4, 6, 11),
    }


@each_budget
@pytest.mark.parametrize("form", forms())
def test_strided_logits(form: str, chunk_bytes: int | None) -> None:
    logits = forms()[form]
    assert not logits.is_contiguous()
    # By the strides as they are: `requires_grad_` makes a leaf of the view.
    assert_scores(logits.detach().requires_grad_(), torch.randint(0, 11, (4, 6)), chunk_bytes)


@pytest.mark.parametrize("form", forms())
def test_strided_logits_are_not_copied(form: str) -> None:
    """But block by block where a row's logits are not adjacent."""
    logits = forms()[form].requires_grad_()
    with AllocationTracker() as tracker:
        result = log_probs(logits, torch.randint(0, 11, (4, 6)), entropy="loss", chunk_bytes=4 * 11 * 4)
    assert tracker.largest_rows(11) == (0 if logits.stride(-1) == 1 else 4)
    with AllocationTracker() as tracker:
        result.log_probs.sum().backward()
    whole = {record.storage for record in tracker.records if record.nbytes > 4 * 11 * 4 and record.shape[-1:] == (11,)}
    # A dense leaf gets a gradient of its own strides, which torch copies.
    assert len(whole) == 1 + (form in ("sequence first", "vocabulary first")), "the gradient and nothing else"


@each_dtype
@each_budget
def test_case_2_3_the_logits_are_left_as_they_were(dtype: torch.dtype, chunk_bytes: int | None) -> None:
    logits = torch.tensor([[0.0, 1, 2, 3]] * 3, dtype=dtype, requires_grad=True)
    before = logits.detach().clone()
    result = log_probs(logits, torch.tensor([3, 0, 3]), temperature=1.0, entropy="loss", chunk_bytes=chunk_bytes)
    (result.log_probs[0] + result.log_probs[1] + result.entropy[2]).backward()
    assert torch.equal(logits, before)
    expected = torch.tensor(
        [
            [-0.0320586, -0.0871443, -0.2368828, 0.3560857],
            [0.9679414, -0.0871443, -0.2368828, -0.6439143],
            [0.0799110, 0.1300762, 0.1167010, -0.3266881],
        ]
    )
    torch.testing.assert_close(logits.grad, expected.to(dtype), rtol=0, atol=1e-6 if dtype.itemsize > 2 else 4e-3)


@each_budget
def test_case_2_4_logits_that_are_a_view_of_something(chunk_bytes: int | None) -> None:
    leaf = torch.randn(6, 7, requires_grad=True)
    base = leaf * 1
    before = base.detach().clone()
    targets = torch.tensor([0, 6, 3, 3])
    result = log_probs(base[1:5], targets, temperature=0.8, entropy="loss", chunk_bytes=chunk_bytes)
    (result.log_probs.sum() + result.entropy.sum()).backward()
    assert torch.equal(base, before)
    other = leaf.detach().clone().requires_grad_()
    log_prob, entropy = reference.log_probs(other[1:5], targets, temperature=0.8)
    (log_prob.sum() + entropy.sum()).backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=0, atol=1e-6)
    assert bool((leaf.grad[[0, 5]] == 0).all())


@each_budget
def test_case_2_5_gradcheck(chunk_bytes: int | None) -> None:
    logits = torch.randn(2, 3, 5, dtype=FP64, requires_grad=True)
    targets, temperature = torch.randint(0, 5, (2, 3)), 0.5 + torch.rand(2, 3, dtype=FP64)

    def score(logits: Tensor) -> tuple[Tensor, ...]:
        return tuple(log_probs(logits, targets, temperature=temperature, entropy="loss", chunk_bytes=chunk_bytes))

    assert torch.autograd.gradcheck(score, [logits])


def test_case_7_7_log_prob_and_entropy_of_an_index_are_of_one_row() -> None:
    logits = torch.randn(2, 5, 9)
    logits[1, 2, 4] = 100.0
    targets = torch.full((2, 5), 4)
    result = log_probs(logits, targets, entropy="metric")
    assert result.log_probs[1, 2].item() == pytest.approx(0, abs=1e-6)
    assert result.entropy[1, 2].item() == pytest.approx(0, abs=1e-6)
    others = torch.ones(2, 5, dtype=torch.bool)
    others[1, 2] = False
    assert bool((result.log_probs[others] < -0.1).all()) and bool((result.entropy[others] > 0.1).all())
