"""`linear_log_probs` against fp64 truth: its values and every gradient, in each dtype, size and chunk budget."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from compact_logits import chunks, linear_log_probs, projection
from compact_logits.engine.slices import plan_chunks
from tests.support.linear_head import Head, assert_as_good_as_plain
from tests.support.parity import assert_gradient_close_to_truth

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# Bytes under which a chunk holds a part of one row, a slice, all: in each dtype of the head below.
BUDGETS = [1, 2_000, None]

each_dtype = pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64], ids=str)
each_budget = pytest.mark.parametrize("chunk_bytes", BUDGETS)


@each_dtype
def test_the_budgets_give_a_part_of_a_row_slices_of_all_rows_and_all_at_once(dtype: torch.dtype) -> None:
    least, few, whole = (plan_chunks(23, 61, dtype, torch.device("cpu"), budget) for budget in BUDGETS)
    assert least.height <= 12 and least.width < 30
    assert few.height >= 12 and 16 <= few.width <= 40 and len(few.slices()) > 1
    assert (whole.height, whole.width) == (23, 61)


@each_dtype
@each_budget
@pytest.mark.parametrize("entropy", ["none", "metric", "loss"])
def test_values_and_gradients(entropy: str, chunk_bytes: int | None, dtype: torch.dtype) -> None:
    head = Head.random(23, 19, 61, dtype, bias=True, temperature="rows")
    ours = head.compact(entropy, chunk_bytes=chunk_bytes)
    floor = 1e-12 if dtype == FP64 else 1e-6
    assert_as_good_as_plain(ours, head.plain(entropy), head.truth(entropy), floor=floor)


@each_budget
@pytest.mark.parametrize(("rows", "hidden", "vocab"), [(1, 1, 1), (1, 8, 1), (2, 3, 2), (7, 5, 1009), (129, 3, 5)])
def test_odd_sizes(rows: int, hidden: int, vocab: int, chunk_bytes: int | None) -> None:
    head = Head.random(rows, hidden, vocab, bias=True, temperature=0.7)
    assert_as_good_as_plain(head.compact(chunk_bytes=chunk_bytes), head.plain(), head.truth())


@each_dtype
@pytest.mark.parametrize("bias", [False, True])
def test_a_head_of_a_real_shape(bias: bool, dtype: torch.dtype) -> None:
    head = Head.random(96, 128, 1536, dtype, bias=bias)
    ours = head.compact(chunk_bytes=96 * 1536)
    assert_as_good_as_plain(ours, head.plain(), head.truth(), floor=1e-12 if dtype == FP64 else 1e-6)


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_over_many_rows_no_error_is_above_plains(dtype: torch.dtype, scale: float) -> None:
    """In the L2 norm, where single roundings average out and a formula that loses digits shows."""
    head = Head.random(256, 64, 2049, dtype, temperature=0.7)
    head = replace(head, hidden=head.hidden * scale)
    ours, plain, truth = head.compact(chunk_bytes=2**20), head.plain(), head.truth()
    for name in truth:
        assert_gradient_close_to_truth(ours[name], plain[name], truth[name], factor=1.02, floor=0.0, name=name)


@each_budget
@each_dtype
def test_no_rows_are_still_attached(dtype: torch.dtype, chunk_bytes: int | None) -> None:
    head = Head.random(0, 5, 7, dtype, bias=True)
    ours = head.compact(chunk_bytes=chunk_bytes)
    for name in ("log_probs", "entropy"):
        assert ours[name].shape == (0,) and ours[name].dtype == torch.promote_types(dtype, FP32)
    for name, like in (("d_hidden", head.hidden), ("d_weight", head.weight), ("d_bias", head.bias)):
        gradient = ours[name]
        assert gradient.shape == like.shape and gradient.dtype == dtype and bool((gradient == 0).all())


@pytest.mark.parametrize("temperature", [0.25, 1.0, 1.7, "rows"])
def test_temperature_reaches_values_and_gradients(temperature: float | str) -> None:
    head = Head.random(17, 8, 33, temperature=temperature)
    assert_as_good_as_plain(head.compact(chunk_bytes=2_000), head.plain(), head.truth())
    other = head.compact("none", chunk_bytes=2_000)
    assert_as_good_as_plain(other, head.plain("none"), head.truth("none"))


def test_a_no_grad_pass_gives_the_bits_of_a_training_pass() -> None:
    head = Head.random(40, 16, 100, BF16, bias=True)
    trained = head.compact(chunk_bytes=5_000)
    with torch.no_grad():
        scored = linear_log_probs(
            head.hidden, head.weight, head.targets, bias=head.bias, entropy="metric", chunk_bytes=5_000
        )
    assert torch.equal(scored.log_probs, trained["log_probs"]) and torch.equal(scored.entropy, trained["entropy"])


def test_gradcheck() -> None:
    head = Head.random(5, 4, 7, FP64, bias=True, temperature="rows")
    leaves = [t.clone().requires_grad_() for t in (head.hidden, head.weight, head.bias)]

    def score(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            linear_log_probs(
                hidden,
                weight,
                head.targets,
                bias=bias,
                temperature=head.temperature.double(),
                entropy="loss",
                chunk_bytes=300,
            )
        )

    assert torch.autograd.gradcheck(score, leaves)


def test_a_wrong_gradient_would_be_seen() -> None:
    head = Head.random(23, 19, 61)
    ours = head.compact()
    ours["d_weight"][3] += 1e-4
    with pytest.raises(AssertionError, match="d_weight: relative error"):
        assert_as_good_as_plain(ours, head.plain(), head.truth())


def test_case_1_8_every_chunk_budget_gives_the_same() -> None:
    rows, vocab = 24, 50
    head = Head.random(rows, 8, vocab, FP64)
    whole = head.compact()
    for groups, slices, chunk_bytes in ((4, 3, 1), (2, 3, 2_500), (1, 3, 4_500), (1, 2, 6_000), (1, 1, 11_500)):
        plan = plan_chunks(rows, vocab, FP64, torch.device("cpu"), chunk_bytes)
        assert (len(plan.groups()), len(plan.slices())) == (groups, slices)
        for name, value in head.compact(chunk_bytes=chunk_bytes).items():
            torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-12)


@each_dtype
def test_as_many_slices_as_the_budget_holds_are_formed_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", {"cpu": 2_000})
    monkeypatch.setattr(chunks, "_GOOD_WIDTH", 16)
    budget = 12_000 * dtype.itemsize // 2
    plan = plan_chunks(23, 300, dtype, torch.device("cpu"), budget)
    slices = len(plan.slices())
    assert len(plan.groups()) == 1 and 1 < plan.held < slices - 1
    head = Head.random(23, 19, 300, dtype, bias=True, temperature="rows")
    with mock.patch.object(projection, "project", wraps=projection.project) as formed:
        ours = head.compact("loss", chunk_bytes=budget)
    assert formed.call_count == 2 * slices - plan.held
    floor = 1e-12 if dtype == FP64 else 1e-6
    assert_as_good_as_plain(ours, head.plain("loss"), head.truth("loss"), floor=floor)


def test_case_3_5_the_weight_gradients_error_does_not_grow_with_the_chunks() -> None:
    head = Head.random(1024, 64, 96, BF16)
    truth = head.truth("none")
    one, many = head.compact("none"), head.compact("none", chunk_bytes=1)
    assert_as_good_as_plain(many, one, truth)
    # What the test must catch: each row's product rounded to bf16 and added in bf16.
    total = torch.zeros_like(head.weight)
    logits = (head.hidden @ head.weight.T).float()
    d_logits = torch.nn.functional.one_hot(head.targets, 96) - logits.softmax(1)
    for d_row, row in zip((d_logits * head.d_log_probs[:, None]).bfloat16(), head.hidden, strict=True):
        total += torch.outer(d_row, row)
    with pytest.raises(AssertionError, match="d_weight"):
        assert_as_good_as_plain(many | {"d_weight": total}, one, truth)


@pytest.mark.parametrize("tiles", [1, 64])
def test_case_3_5_the_hidden_gradient_over_a_wide_vocabulary(tiles: int) -> None:
    head = Head.random(64, 16, 2**14, BF16)
    ours = head.compact("none", chunk_bytes=2 * 2 * 2**14 * 64 // tiles)
    assert_as_good_as_plain(ours, head.plain("none"), head.truth("none"))
