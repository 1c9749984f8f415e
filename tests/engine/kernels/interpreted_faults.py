"""`compare_kernels` passes the Triton kernels in fp32, and fails each of these faults. Run by `test_interpreter`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from compact_logits.engine.kernels import compare, triton_kernels

# What is replaced in the source, by what, and whose error must show it.
FAULTS: dict[str, tuple[str, str, str]] = {
    "a row of -inf so far is its own base": (
        'base = tl.where(new == float("-inf"), 0.0, new)  #',
        "base = new  #",
        "row_stats",
    ),
    "blocks are not rescaled": ("rescale = tl.exp(shift)", "rescale = 1.0", "row_stats"),
    "the maximum is the last block's": ("new = tl.maximum(maximum, tl.max(z, 0))", "new = tl.max(z, 0)", "row_stats"),
    "slices are not rescaled": (
        "weight_before, weight = tl.exp(shift_before)",
        "weight_before, weight = 1.0",
        "row_stats",
    ),
    "the moment is not shifted": ("(moment + shift * total)", "moment", "row_stats"),
    "the moment of a slice is not shifted": ("shift_before * total_before)", "0.0)", "row_stats"),
    "squares are rescaled once": ("rescale * rescale * squares", "rescale * squares", "row_stats"),
    "NaN is lost": (
        "z = tl.where(z < _LEAST_EXPONENT, _LEAST_EXPONENT, z)",
        "z = tl.where(z > _LEAST_EXPONENT, z, _LEAST_EXPONENT)",
        "row_stats",
    ),
    "one column too many is read": ("mask=offsets < columns, other", "mask=offsets <= columns, other", "row_stats"),
    "the last columns are left out": ("if whole < columns:", "if whole > columns:", "row_stats"),
    "one temperature for all rows": (
        "scale = tl.load(inverse_temperature + row)",
        "scale = tl.load(inverse_temperature)",
        "row_stats",
    ),
    "the slope is ignored": ("if SLOPE:", "if SLOPE and False:", "softmax_grad with slope"),
    "the slope of 0 * -inf is NaN": (
        "tl.where(z < _LEAST_EXPONENT, _LEAST_EXPONENT, z)\n    return",
        "z\n    return",
        "softmax_grad with slope",
    ),
    "one shift for all rows": ("tl.load(shift + row)", "tl.load(shift)", "softmax_grad"),
    "one column too many is written": ("inside = offsets < columns\n", "inside = offsets <= columns\n", "softmax_grad"),
    "ids before the slice are clamped": (
        "other=-1) - first",
        "other=-1) - first\n    column = tl.maximum(column, 0)",
        "write_at",
    ),
    "ids are those of the first slice": ("other=-1) - first", "other=-1)", "write_at"),
    "an id behind the slice is written": ("(column < columns)", "(column <= columns)", "write_at"),
}


def errors_of(kernels: ModuleType) -> dict[str, float]:
    return compare.compare_kernels(kernels, torch.device("cpu"))


def broken(old: str, new: str, path: Path) -> ModuleType:
    source = Path(triton_kernels.__file__).read_text()
    assert old in source, f"the kernels no longer have {old!r}"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_kernels_pass_but_where_the_interpreter_truncates() -> None:
    errors = errors_of(triton_kernels)
    kernels = ("row_stats", "softmax_grad", "softmax_grad with slope", "write_at")
    dtypes = ("float32", "bfloat16", "float16")
    assert set(errors) == {f"{kernel} {dtype}" for kernel in kernels for dtype in dtypes}
    # What it computes in bf16 it truncates, where a GPU rounds: that is a fault as well.
    assert {name for name, error in errors.items() if not error <= 1.0} == {f"{name} bfloat16" for name in kernels[1:]}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(compare, "_WIDTHS", compare._WIDTHS[1:])
    old, new, kernel = FAULTS[fault]
    error = errors_of(broken(old, new, tmp_path / "broken_kernels.py"))[f"{kernel} float32"]
    assert not error <= 1.0, error
