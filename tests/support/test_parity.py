"""The parity helpers pass what is as good as plain code, and fail everything else, by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.parity import assert_close_to_truth, assert_gradient_close_to_truth

CHECKS = [assert_close_to_truth, assert_gradient_close_to_truth]
each_check = pytest.mark.parametrize("check", CHECKS)


def fp64() -> Tensor:
    return torch.linspace(-3, 5, 12, dtype=torch.float64).reshape(3, 4)


@each_check
def test_rounding_like_plain_passes_and_the_error_comes_back(check: Callable[..., float]) -> None:
    truth = fp64()
    error = check(truth.bfloat16(), truth.bfloat16(), truth)
    assert 1e-4 < error < 2e-2
    assert check(truth.float(), truth.float(), truth) < 1e-6
    assert check(truth.bfloat16(), truth.bfloat16(), truth.float()) == pytest.approx(error, rel=1e-3)


@each_check
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("whose", ["ours", "plain", "truth"])
def test_anything_not_finite_fails(check: Callable[..., float], whose: str, bad: float) -> None:
    tensors = {"ours": fp64().float(), "plain": fp64().float(), "truth": fp64()}
    tensors[whose][1, 2] = bad
    with pytest.raises(AssertionError, match=f"entropy: {whose} has 1 of 12 entries that are not finite"):
        check(**tensors, name="entropy")


@each_check
def test_a_wrong_value_fails_with_its_numbers(check: Callable[..., float]) -> None:
    ours = fp64().float()
    ours[0, 0] += 1e-3
    with pytest.raises(AssertionError, match=r"log-prob: .* error \d\.\d+e-04 is above 1\.1 x plain") as failure:
        check(ours - 5e-4, fp64().float(), fp64(), name="log-prob")
    assert "+ 1e-06 =" in str(failure.value)


@each_check
def test_factor_and_floor_set_the_bound(check: Callable[..., float]) -> None:
    truth = torch.ones(4, dtype=torch.float64)
    plain, ours = (truth + 1e-3).float(), (truth + 1.2e-3).float()
    with pytest.raises(AssertionError, match="above"):
        check(ours, plain, truth)
    check(ours, plain, truth, factor=1.3)
    check(ours, plain, truth, floor=1e-3)


def test_the_floor_of_small_values_is_theirs() -> None:
    truth = torch.full((4,), 1e-3, dtype=torch.float64)
    assert_close_to_truth((truth + 1e-9).float(), truth.float(), truth, floor=1e-5)
    with pytest.raises(AssertionError, match="above"):
        assert_close_to_truth((truth + 1e-6).float(), truth.float(), truth, floor=1e-5)


@each_check
def test_a_limit_holds_however_bad_plain_is(check: Callable[..., float]) -> None:
    truth = fp64()
    check(truth.bfloat16(), truth.bfloat16(), truth)
    with pytest.raises(AssertionError, match=r"is above the limit 1\.000e-05"):
        check(truth.bfloat16(), truth.bfloat16(), truth, limit=1e-5)


@each_check
def test_another_shape_dtype_or_a_narrow_truth_fails(check: Callable[..., float]) -> None:
    truth, plain = fp64(), fp64().float()
    with pytest.raises(AssertionError, match=r"shapes differ: ours \(12,\) torch.float32"):
        check(plain.flatten(), plain, truth)
    with pytest.raises(AssertionError, match=r"shapes differ: .* truth \(4,\)"):
        check(plain.clone(), plain, truth[0])
    with pytest.raises(AssertionError, match="dtypes differ: ours .* torch.bfloat16, plain .* torch.float32"):
        check(plain.bfloat16(), plain, truth)
    with pytest.raises(AssertionError, match="truth must be wider than ours"):
        check(plain.clone(), plain, plain.clone())


@each_check
def test_a_value_compared_with_itself_fails(check: Callable[..., float]) -> None:
    plain = fp64().float()
    with pytest.raises(AssertionError, match="compared with itself"):
        check(plain, plain, fp64())


@each_check
def test_a_missing_gradient_fails(check: Callable[..., float]) -> None:
    with pytest.raises(AssertionError, match="weight: nothing there: ours None"):
        check(None, fp64().float(), fp64(), name="weight")


def test_a_gradient_is_judged_by_its_norm() -> None:
    truth = torch.zeros(1000, dtype=torch.float64)
    truth[0] = 100.0
    plain, ours = truth.float(), truth.float()
    ours[1] = 5e-5
    assert assert_gradient_close_to_truth(ours, plain, truth) == pytest.approx(5e-7, rel=1e-3)
    with pytest.raises(AssertionError):
        assert_close_to_truth(ours, plain, truth)


def test_a_zero_gradient_is_zero_exactly() -> None:
    truth = torch.zeros(4, dtype=torch.float64)
    assert assert_gradient_close_to_truth(torch.zeros(4), torch.ones(4), truth) == 0.0
    with pytest.raises(AssertionError, match="the truth is zero throughout, ours reaches 1"):
        assert_gradient_close_to_truth(torch.full((4,), 1e-8), torch.ones(4), truth)


@each_check
def test_no_rows_are_no_error(check: Callable[..., float]) -> None:
    assert check(torch.zeros(0, 4), torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.float64)) == 0.0
