"""Compare a result with fp64 truth by the error that plain code of the same dtype makes."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assert_close_to_truth", "assert_gradient_close_to_truth"]


def assert_close_to_truth(
    ours: Tensor,  # (...)
    plain: Tensor,  # (...), the same dtype as ours
    truth: Tensor,  # (...), fp64, or fp32 where ours is narrower
    *,
    factor: float = 1.1,
    floor: float = 1e-6,
    limit: float | None = None,
    name: str = "value",
) -> float:
    """Largest absolute error of `ours`: at most `factor` times that of `plain`, plus `floor` of the largest true value.

    (Of 1, if that is more.) With `limit`, it may not pass that either, however bad `plain` is. Raises `AssertionError`
    for that, for another shape or dtype than `plain` has, and for anything in the three that is not finite.
    """
    wide_ours, wide_plain, wide_truth = _comparable(ours, plain, truth, name)
    error = _largest(wide_ours - wide_truth)
    floor *= min(_largest(wide_truth), 1.0)
    _judge(error, _largest(wide_plain - wide_truth), factor, floor, limit, f"{name}: largest error")
    return error


def assert_gradient_close_to_truth(
    ours: Tensor | None,  # (...)
    plain: Tensor | None,  # (...), the same dtype as ours
    truth: Tensor | None,  # (...), fp64, or fp32 where ours is narrower
    *,
    factor: float = 1.1,
    floor: float = 1e-6,
    limit: float | None = None,
    name: str = "gradient",
) -> float:
    """Error of `ours` in the L2 norm, relative to the norm of `truth`. Bounds and errors as `assert_close_to_truth`.

    Where `truth` is zero throughout, so must `ours` be. A missing gradient (None) is a failure, not a zero.
    """
    wide_ours, wide_plain, wide_truth = _comparable(ours, plain, truth, name)
    norm = wide_truth.norm().item()
    if norm == 0.0:
        error = _largest(wide_ours)
        assert error == 0.0, f"{name}: the truth is zero throughout, ours reaches {error:.3e}"
        return error
    error = (wide_ours - wide_truth).norm().item() / norm
    _judge(error, (wide_plain - wide_truth).norm().item() / norm, factor, floor, limit, f"{name}: relative error")
    return error


def _comparable(
    ours: Tensor | None, plain: Tensor | None, truth: Tensor | None, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The three as fp64 on the CPU, once they are known to be three, alike and finite."""
    assert ours is not None and plain is not None and truth is not None, (
        f"{name}: nothing there: ours {_kind(ours)}, plain {_kind(plain)}, truth {_kind(truth)}"
    )
    assert ours is not plain and ours is not truth and plain is not truth, f"{name}: compared with itself"
    assert ours.shape == plain.shape == truth.shape, (
        f"{name}: shapes differ: ours {_kind(ours)}, plain {_kind(plain)}, truth {_kind(truth)}"
    )
    assert ours.dtype == plain.dtype, f"{name}: dtypes differ: ours {_kind(ours)}, plain {_kind(plain)}"
    assert truth.dtype == torch.float64 or (truth.dtype == torch.float32 and ours.dtype.itemsize < 4), (
        f"{name}: truth must be wider than ours, got truth {_kind(truth)}, ours {_kind(ours)}"
    )
    for who, tensor in (("ours", ours), ("plain", plain), ("truth", truth)):
        bad = int((~torch.isfinite(tensor)).sum())
        assert bad == 0, f"{name}: {who} has {bad} of {tensor.numel()} entries that are not finite"
    wide = [tensor.detach().to("cpu", torch.float64) for tensor in (ours, plain, truth)]
    return wide[0], wide[1], wide[2]


def _kind(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _judge(error: float, plain_error: float, factor: float, floor: float, limit: float | None, what: str) -> None:
    bound = factor * plain_error + floor
    assert error <= bound, f"{what} {error:.3e} is above {factor:g} x plain {plain_error:.3e} + {floor:g} = {bound:.3e}"
    assert limit is None or error <= limit, f"{what} {error:.3e} is above the limit {limit:.3e}"
