"""Where two terms of a gradient nearly cancel: confident targets, and a student that nearly agrees with its teacher.

A term added in 16 bits leaves an error of 100% there, and trained policies and late distillation live there.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from compact_logits.engine.kernels import softmax_grad_
from compact_logits.engine.scorer import SoftmaxGrad
from tests.support.linear_head import Head, Results, assert_as_good_as_plain

ROWS, HIDDEN, VOCAB = 64, 48, 500
PROBABILITIES = (0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999)

each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
each_probability = pytest.mark.parametrize("probability", PROBABILITIES)


def confident(probability: float, dtype: torch.dtype) -> Head:
    """Hidden states so long in the direction of their target that it has this probability."""
    head = Head.random(ROWS, HIDDEN, VOCAB, dtype, temperature="rows")
    weight = torch.nn.functional.normalize(head.weight.double(), dim=1)
    low, high = torch.zeros(ROWS, 1, dtype=torch.float64), torch.full((ROWS, 1), 1e3, dtype=torch.float64)
    for _ in range(60):
        hidden = (low + high) / 2 * weight[head.targets] + 0.3 * head.hidden.double()
        logits = hidden @ weight.T / head.temperature[:, None]
        below = logits.softmax(dim=1).gather(1, head.targets[:, None]) < probability
        low, high = torch.where(below, (low + high) / 2, low), torch.where(below, high, (low + high) / 2)
    upstream = {"d_log_probs": torch.ones(ROWS), "d_entropy": torch.full((ROWS,), -0.01)}
    return replace(head, hidden=hidden.to(dtype), weight=weight.to(dtype), **upstream)


def agreeing(head: Head, noise: float) -> Head:
    """With a teacher whose log-probs are the student's own, but for some noise."""
    logits = head.hidden.double() @ head.weight.double().T / head.temperature[:, None]
    logits += noise * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    top = logits.log_softmax(dim=1).topk(8, dim=1)
    return replace(head, teacher_log_probs=top.values.float(), teacher_ids=top.indices)


def as_logits(head: Head) -> Head:
    """The rounded logits before an identity: no rounding of a product hides that of their gradient."""
    return replace(head, hidden=head.hidden @ head.weight.T, weight=torch.eye(VOCAB, dtype=head.weight.dtype))


@each_dtype
@each_probability
@pytest.mark.parametrize("what", ["none", "loss", "top_p"])
def test_gradients_at_confident_targets(what: str, probability: float, dtype: torch.dtype) -> None:
    head = confident(probability, dtype)
    reached = head.truth("none")["log_probs"].exp().median().item()
    assert 1 - reached == pytest.approx(1 - probability, rel=0.2)
    for each in (head, as_logits(head)):
        for chunk_bytes in (1, None):
            ours = each.compact(what, chunk_bytes=chunk_bytes)
            assert_as_good_as_plain(ours, each.plain(what), each.truth(what), where=f"{each.hidden.shape[1]} ")


@each_dtype
@pytest.mark.parametrize("noise", [1e-1, 1e-2, 1e-3, 0.0])
@pytest.mark.parametrize("probability", [0.5, 0.99, 0.9999])
@pytest.mark.parametrize("what", ["topk", "tail"])
def test_gradients_of_a_student_that_agrees_with_its_teacher(
    what: str, probability: float, noise: float, dtype: torch.dtype
) -> None:
    head = confident(probability, dtype)
    for each in (agreeing(head, noise), agreeing(as_logits(head), noise)):
        plain, truth = gradients(each.plain(what)), gradients(each.truth(what))
        for chunk_bytes in (1, None):
            ours = gradients(each.compact(what, chunk_bytes=chunk_bytes))
            assert_as_good_as_plain(ours, plain, truth, where=f"{each.hidden.shape[1]} ")


def gradients(results: Results) -> Results:
    """The losses of rows that agree are all of the size of fp32's own roundings."""
    return {name: each for name, each in results.items() if name.startswith("d_")}


@each_dtype
@pytest.mark.parametrize("probability", PROBABILITIES[2:])
def test_a_target_added_in_16_bits_would_be_seen(probability: float, dtype: torch.dtype) -> None:
    def write_(self: SoftmaxGrad, logits: Tensor, first: int) -> None:
        softmax_grad_(logits, self.inverse_temperature, self.shift, self.scale, self.slope)
        logits.scatter_add_(1, self.ids, self.inverse_temperature[:, None].to(logits.dtype))  # upstream is 1

    head = confident(probability, dtype)
    with mock.patch.object(SoftmaxGrad, "write_", write_):
        ours = head.compact("none")
    with pytest.raises(AssertionError, match="d_hidden: relative error"):
        assert_as_good_as_plain(ours, head.plain("none"), head.truth("none"))
