"""Foreign values as numbers, and in a message: short whatever they are, and never an error."""

from __future__ import annotations

from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import pytest
import torch

from compact_logits.host_values import as_float, as_index, describe


class Failing:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


class Endless(list):  # type: ignore[type-arg]
    def __repr__(self) -> str:
        raise RecursionError("too deep")


class Wordy:
    def __repr__(self) -> str:
        return "w" * 10**6


class Color(IntEnum):
    RED = 3


class NoReal(Fraction):
    def __float__(self) -> float:
        raise ValueError("not today")


def circle() -> list[Any]:
    found: list[Any] = [1]
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (0, "0"),
        (-5, "-5"),
        (2**200, str(2**200)),
        (10**400, "an int of some 401 digits"),
        (-(10**6000), "an int of some 6001 digits"),
        (1.5, "1.5"),
        (float("nan"), "nan"),
        ("x", "'x'"),
        ("a\nb", "'a\\nb'"),
        ("y" * 81, "'" + "y" * 80 + "'..."),
        (b"z" * 10**6, "b'" + "z" * 80 + "'..."),
        ([1, 2, 3], "'[1, 2, 3]' of list"),
        (list(range(10**6)), "'[0, 1, 2, 3, 4, 5, ...]' of list"),
        ((0, 7), "'(0, 7)' of tuple"),
        ({"a": 1}, "\"{'a': 1}\" of dict"),
        ([10**6000], "a value of list"),
        (circle(), "'[1, [1, [1, [1, [1, [1, [...]]]]]]]' of list"),
        (torch.zeros(10**6), "a tensor (1000000,) of torch.float32 on cpu"),
        (torch.zeros(2, 3, dtype=torch.bool, device="meta"), "a tensor (2, 3) of torch.bool on meta"),
        (Color.RED, "'<Color.RED: 3>' of Color"),
        (Decimal("0.5"), "\"Decimal('0.5')\" of Decimal"),
        (int, "\"<class 'int'>\" of type"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_a_message_says(value: object, text: str) -> None:
    assert describe(value) == text


@pytest.mark.parametrize(
    "value", [Failing(), [Failing()], Endless(), Wordy(), [Wordy()] * 9, "\n" * 10**6, {1: "k" * 10**6}], ids="abcdefg"
)
def test_it_is_always_a_few_words(value: object) -> None:
    assert 0 < len(describe(value)) < 250
    assert type(value).__name__ in describe(value) or isinstance(value, str)


def test_a_nested_tensor() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    assert describe(nested).startswith("a ") and len(describe(nested)) < 250


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3),
        (Color.RED, 3),
        (torch.tensor(3), 3),
        (2**63 - 1, 2**63 - 1),
        (-(2**63), -(2**63)),
        (2**63, None),
        (True, None),
        (torch.tensor(True), None),
        (torch.tensor(3.0), None),
        (torch.arange(2), None),
        (3.0, None),
        ("3", None),
        (None, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whole_numbers(value: object, number: int | None) -> None:
    found = as_index(value)
    assert found == number and type(found) in (int, type(None))


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3.0),
        (Fraction(1, 4), 0.25),
        (10**400, float("inf")),
        (-(10**400), float("-inf")),
        (Fraction(10**400), float("inf")),
        (NoReal(1, 2), None),
        (True, None),
        (1j, None),
        ("1.0", None),
        (Decimal("0.5"), None),
        (torch.tensor(1.0), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_real_numbers(value: object, number: float | None) -> None:
    found = as_float(value)
    assert found == number and type(found) in (float, type(None))


def test_numpys_numbers_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert as_index(numpy.int32(3)) == 3 and as_index(numpy.uint64(2**63)) is None
    assert as_float(numpy.float32(0.5)) == 0.5 and as_float(numpy.int64(2)) == 2.0
    assert as_index(numpy.True_) is as_float(numpy.True_) is as_index(numpy.float64(1)) is None
    assert describe(numpy.zeros(10**6)).endswith("of ndarray") and len(describe(numpy.zeros(10**6))) < 250
