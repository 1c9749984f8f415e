"""Every scorer against fp64 truth: outputs and gradients as near to it as plain torch of the same dtype.

"As near" is the contract: an error of at most 1.1 times the plain path's, and 1e-6 of the largest true value.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from compact_logits import linear_log_probs
from compact_logits.engine import linear, slices
from tests.support.linear_head import SCORERS, Head, assert_as_good_as_plain
from tests.support.parity import assert_gradient_close_to_truth

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
ROWS, HIDDEN, VOCAB = 23, 19, 301

each_scorer = pytest.mark.parametrize("what", SCORERS)
each_dtype = pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64], ids=str)

# Columns that the budget holds, and how many slices there are, and how many of them are saved for backward.
CUTS = {"one slice": (900, 1, 1), "some saved": (256, 3, 1), "none saved": (0, 5, 0), "all saved": (900, 5, 5)}


def budget_of(dtype: torch.dtype, columns: int) -> int:
    return max(ROWS * columns * dtype.itemsize, 1)


def floor_of(dtype: torch.dtype) -> float:
    return 1e-12 if dtype == FP64 else 1e-6


@each_scorer
@each_dtype
@pytest.mark.parametrize("cut", CUTS)
def test_outputs_and_gradients(what: str, dtype: torch.dtype, cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    columns, count, saved = CUTS[cut]
    if cut == "all saved":  # which slices that fit are on a CPU only, in fp32 and wider
        monkeypatch.setattr(slices, "_CPU_SLICE", budget_of(dtype, 64))
        count, saved = (5, 5) if dtype.itemsize > 2 else (1, 1)
    plan = slices.vocab_slices(ROWS, VOCAB, HIDDEN, dtype, torch.device("cpu"), budget_of(dtype, columns))
    assert (len(plan), plan.saved) == (count, saved)
    head = Head.random(ROWS, HIDDEN, VOCAB, dtype, bias=True, temperature="rows")
    with mock.patch.object(linear, "project", wraps=linear.project) as formed:
        ours = head.compact(what, chunk_bytes=budget_of(dtype, columns))
    assert formed.call_count == 2 * count - saved
    assert_as_good_as_plain(ours, head.plain(what), head.truth(what), floor=floor_of(dtype))


@pytest.mark.parametrize("what", [each for each in SCORERS if each != "top_p"])  # replayed from hidden states only
@each_dtype
@pytest.mark.parametrize("chunk_bytes", [1, 4_000, None])
def test_given_logits(what: str, dtype: torch.dtype, chunk_bytes: int | None) -> None:
    head = Head.random(ROWS, HIDDEN, 61, dtype, bias=True, temperature="rows")
    ours = head.with_logits(what, chunk_bytes=chunk_bytes)
    assert_as_good_as_plain(ours, head.plain(what), head.truth(what), floor=floor_of(dtype))


@each_scorer
@pytest.mark.parametrize("size", [(1, 1, 1), (1, 8, 1), (2, 3, 2), (7, 5, 1009), (129, 3, 65)], ids=str)
def test_odd_sizes(what: str, size: tuple[int, int, int]) -> None:
    head = Head.random(*size, bias=True, temperature=0.7)
    for chunk_bytes in (1, None):
        assert_as_good_as_plain(head.compact(what, chunk_bytes=chunk_bytes), head.plain(what), head.truth(what))


@each_scorer
@pytest.mark.parametrize("temperature", [0.25, 1.0, 1.7])
def test_one_temperature_for_all_rows(what: str, temperature: float) -> None:
    head = Head.random(17, 8, 133, temperature=temperature)
    assert_as_good_as_plain(head.compact(what, chunk_bytes=1), head.plain(what), head.truth(what))


@each_dtype
@pytest.mark.parametrize("bias", [False, True])
def test_a_head_of_a_real_shape(bias: bool, dtype: torch.dtype) -> None:
    head = Head.random(96, 128, 1536, dtype, bias=bias)
    ours = head.compact(chunk_bytes=96 * 1536)
    assert_as_good_as_plain(ours, head.plain(), head.truth(), floor=floor_of(dtype))


@each_scorer
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_over_many_rows_no_error_is_above_plains(what: str, dtype: torch.dtype, scale: float) -> None:
    """In the L2 norm, where single roundings average out and a formula that loses digits shows."""
    head = Head.random(256, 64, 2049, dtype, temperature=0.7)
    head = replace(head, hidden=head.hidden * scale)
    ours, plain, truth = head.compact(what, chunk_bytes=2**18), head.plain(what), head.truth(what)
    for name in ours.keys() - {"overlap_count", "overlap_token_advantage", "teacher_mass", "teacher_tail_mass"}:
        factor = 1.02 if dtype == BF16 else 1.1  # where single roundings are as large as the whole error
        assert_gradient_close_to_truth(ours[name], plain[name], truth[name], factor=factor, floor=0.0, name=name)


@each_scorer
@each_dtype
def test_no_rows_are_still_attached(what: str, dtype: torch.dtype) -> None:
    head = Head.random(0, 5, 97, dtype, bias=True)
    for chunk_bytes in (1, None):
        ours = head.compact(what, chunk_bytes=chunk_bytes)
        assert_as_good_as_plain(ours, head.plain(what), head.truth(what))
        for name, like in (("d_hidden", head.hidden), ("d_weight", head.weight), ("d_bias", head.bias)):
            gradient = ours[name]
            assert like is not None and gradient is not None
            assert gradient.shape == like.shape and gradient.dtype == dtype and not gradient.any()


@each_scorer
@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias", "hidden weight", "hidden bias", "weight bias"])
def test_case_3_8_frozen_inputs_get_no_gradient(what: str, frozen: str) -> None:
    head = Head.random(13, 6, 133, bias=True)
    names = ("hidden", "weight", "bias")
    plain, truth = head.plain(what), head.truth(what)
    for chunk_bytes in (1, None):
        tensors = {name: getattr(head, name).clone().requires_grad_(name not in frozen) for name in names}
        outputs = head.scored(what, **tensors, chunk_bytes=chunk_bytes)
        backward(head, outputs)
        assert all(tensors[name].grad is None for name in frozen.split())
        ours = {f"d_{name}": tensors[name].grad for name in names if name not in frozen}
        assert_as_good_as_plain(ours, {n: plain[n] for n in ours}, {n: truth[n] for n in ours})


def backward(head: Head, outputs: dict[str, Tensor]) -> None:
    roots = [(each, head.d_entropy if n == "entropy" else head.d_log_probs) for n, each in outputs.items()]
    torch.autograd.backward(*zip(*[pair for pair in roots if pair[0].requires_grad], strict=True))


@pytest.mark.parametrize("what", ["loss", "top_p", "tail"])
def test_case_2_5_gradcheck(what: str) -> None:
    head = Head.random(5, 4, 97, FP64, bias=True, temperature="rows", seed=1)
    leaves = [t.clone().requires_grad_() for t in (head.hidden, head.weight, head.bias)]

    def score(*tensors: Tensor) -> list[Tensor]:
        return [each for each in head.scored(what, *tensors, chunk_bytes=1).values() if each.requires_grad]

    assert torch.autograd.gradcheck(score, leaves)


@pytest.mark.parametrize("name", ["d_weight", "log_probs"])
def test_a_wrong_result_would_be_seen(name: str) -> None:
    head = Head.random(23, 19, 61)
    ours = head.compact()
    ours[name][3] += 1e-4
    with pytest.raises(AssertionError, match=f"{name}: (relative|largest) error"):
        assert_as_good_as_plain(ours, head.plain(), head.truth())


def test_case_1_8_every_budget_gives_the_same() -> None:
    head = Head.random(24, 8, 500, FP64)
    whole = head.compact()
    for count, columns in ((8, 0), (4, 256), (3, 384), (1, 1200)):
        budget = max(columns * 24 * 8, 1)
        assert len(slices.vocab_slices(24, 500, 8, FP64, torch.device("cpu"), budget)) == count
        for name, value in head.compact(chunk_bytes=budget).items():
            torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-12)


def test_case_3_5_errors_of_gradients_do_not_grow_with_the_slices() -> None:
    """That of the hidden states is summed in fp32, a row of the weight's is one product."""
    head = Head.random(64, 16, 2**13, BF16)
    one, many, truth = head.compact("none"), head.compact("none", chunk_bytes=1), head.truth("none")
    assert_as_good_as_plain(many, one, truth)
    # What the test must catch: products of slices that are rounded to bf16 and added in bf16.
    logits = (head.hidden @ head.weight.T).float()
    d_logits = torch.nn.functional.one_hot(head.targets, 2**13) - logits.softmax(1)
    d_logits = (d_logits * head.d_log_probs[:, None]).bfloat16()
    total = torch.zeros_like(head.hidden)
    for columns in range(0, 2**13, 64):
        total += d_logits[:, columns : columns + 64] @ head.weight[columns : columns + 64]
    with pytest.raises(AssertionError, match="d_hidden"):
        assert_as_good_as_plain(many | {"d_hidden": total}, one, truth)


def test_a_bias_is_rounded_with_the_product_as_in_a_linear_layer() -> None:
    head = Head.random(64, 64, 512, BF16, bias=True)
    truth = head.truth()["log_probs"]
    for chunk_bytes in (64 * 512, None):
        ours = head.compact(chunk_bytes=chunk_bytes)["log_probs"]
        assert_gradient_close_to_truth(ours, head.plain()["log_probs"], truth)
    rounded_twice = head.defined(head.hidden @ head.weight.T + head.bias, "none")["log_probs"]
    with pytest.raises(AssertionError, match="relative error"):
        assert_gradient_close_to_truth(rounded_twice, head.plain()["log_probs"], truth)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_case_11_5_autocast_computes_the_product_in_its_dtype(dtype: torch.dtype) -> None:
    head = Head.random(31, 16, 140, bias=True)
    with torch.autocast("cpu", dtype=dtype):
        ours, plain = head.compact(chunk_bytes=1), head.plain()
    assert ours["log_probs"].dtype == ours["entropy"].dtype == ours["d_weight"].dtype == FP32
    assert_as_good_as_plain(ours, plain, head.truth())
    narrow = replace(head, hidden=head.hidden.to(dtype), weight=head.weight.to(dtype), bias=head.bias.to(dtype))
    assert torch.equal(ours["log_probs"], narrow.compact(chunk_bytes=1)["log_probs"])
    wide = replace(head.wide, temperature=1.0)
    with torch.autocast("cpu", dtype=dtype):  # which leaves fp64 alone
        assert_as_good_as_plain(wide.compact(), wide.plain(), wide.truth(), floor=1e-12)


@pytest.mark.parametrize("chunk_bytes", [1, None])
def test_backward_under_autocast_keeps_the_dtype_of_forward(chunk_bytes: int | None) -> None:
    head = Head.random(31, 16, 140)
    hidden, weight = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
    loss = linear_log_probs(hidden, weight, head.targets, chunk_bytes=chunk_bytes).log_probs @ head.d_log_probs
    with torch.autocast("cpu", dtype=BF16):
        loss.backward()
    ours: dict[str, Any] = {"d_hidden": hidden.grad, "d_weight": weight.grad}
    plain, truth = ({n: of[n] for n in ours} for of in (head.plain("none"), head.truth("none")))
    assert_as_good_as_plain(ours, plain, truth)
