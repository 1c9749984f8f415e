"""Values that a caller passes on the host: as the numbers they are, and as a message shows them."""

from __future__ import annotations

import operator
import reprlib
from numbers import Real

import torch
from torch import Tensor

__all__ = ["as_float", "as_index", "describe", "to_device"]

_LONGEST = 80  # characters of a value in a message

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _LONGEST


def as_index(value: object) -> int | None:
    """The whole number that `value` is, whoever's type it has: Python's, numpy's, any that may index a list.

    `None` for anything else: a bool, a float, a number that int64 does not hold.
    """
    if isinstance(value, bool):
        return None
    try:
        # Some versions of numpy let their bools index a list.
        if str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
            return None
        number = operator.index(value)  # type: ignore[arg-type]
    except Exception:
        return None
    return number if -(2**63) <= number < 2**63 else None


def as_float(value: object) -> float | None:
    """The real number that `value` is, infinite where a float does not hold it; `None` for a bool and anything else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")  # type: ignore[operator]
    except Exception:
        return None


def describe(value: object) -> str:
    """What a message says of `value`, in a few words: literals as Python writes them, a tensor's shape, and of anything
    else what it says of itself and its type. Never the whole of something large, and never an error."""
    kind = type(value).__name__
    try:
        if isinstance(value, Tensor):
            return f"a tensor {tuple(value.shape)} of {value.dtype} on {value.device}"
        if type(value) is int and value.bit_length() > 256:
            return f"an int of some {int(value.bit_length() * 0.30103) + 1} digits"
        if value is None or type(value) in (bool, int, float):
            return repr(value)
        if type(value) in (str, bytes):
            assert isinstance(value, str | bytes)
            return repr(value[:_LONGEST]) + ("..." if len(value) > _LONGEST else "")
        return f"{_repr.repr(value)[:_LONGEST]!r} of {kind}"
    except Exception:
        return f"a value of {kind}"


def to_device(
    values: Tensor,  # (...), on the CPU
    device: torch.device,
) -> Tensor:  # (...), on `device`
    """A copy that the host does not wait for: from pinned memory, since one from pageable memory waits for all that the
    device has still to do."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)
