"""The comparison by which kernels prove themselves: right ones pass it in every dtype, wrong ones do not.

`interpreted_faults` puts faults into the Triton kernels; here they are put around the torch ones, in 16 bits too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compact_logits.engine.kernels import torch_kernels
from compact_logits.engine.kernels.compare import compare_kernels

CPU = torch.device("cpu")
DTYPES = ("float32", "bfloat16", "float16")


def changed(**functions: Callable[..., None]) -> Any:
    right = {name: getattr(torch_kernels, name) for name in torch_kernels.__all__}
    return SimpleNamespace(**(right | functions))


def test_the_torch_kernels_are_themselves_within_a_second() -> None:
    begun = time.process_time()
    errors = compare_kernels(torch_kernels, CPU)  # type: ignore[arg-type]
    assert len(errors) == 4 * len(DTYPES)
    assert all(error <= 1.0 for error in errors.values()), errors
    assert time.process_time() - begun < 1.0


def truncated_grad(logits: Tensor, *of_rows: Any) -> None:
    """Cuts off what a 16-bit number does not hold, where it should be rounded."""
    exact = logits.float()
    torch_kernels.softmax_grad_(exact, *of_rows)
    rounded = exact.to(logits.dtype)
    away = rounded.float().abs() > exact.abs()
    logits.copy_(torch.where(away, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded))


def grad_in_16_bits(logits: Tensor, inverse: Tensor, shift: Tensor, scale: Tensor, slope: Tensor | None) -> None:
    """Rounds on the way too."""
    z = (logits * inverse[:, None].to(logits.dtype)).float() - shift[:, None]
    factor = scale[:, None] if slope is None else scale[:, None] + slope[:, None] * z.clamp(min=-1e3)
    logits.copy_((z.exp() * factor).to(logits.dtype))


def truncated_write(logits: Tensor, ids: Tensor, values: Tensor, first: int) -> None:
    torch_kernels.write_at_(logits, ids, values * (1 - torch.finfo(logits.dtype).eps / 2), first)


def stats_in_16_bits(stats: Tensor, logits: Tensor, inverse: Tensor, moment: bool, squares: bool) -> None:
    scaled = (logits * inverse[:, None]).to(logits.dtype)
    torch_kernels.row_stats_(stats, scaled, torch.ones_like(inverse), moment, squares)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("kernels", "kernel"),
    [
        (changed(softmax_grad_=truncated_grad), "softmax_grad"),
        (changed(softmax_grad_=truncated_grad), "softmax_grad with slope"),
        (changed(softmax_grad_=grad_in_16_bits), "softmax_grad"),
        (changed(write_at_=truncated_write), "write_at"),
        (changed(row_stats_=stats_in_16_bits), "row_stats"),
    ],
)
def test_what_is_rounded_wrongly_is_found(kernels: Any, kernel: str, dtype: str) -> None:
    errors = compare_kernels(kernels, CPU)
    assert not errors[f"{kernel} {dtype}"] <= 1.0
    unchanged = [name for name in errors if not name.startswith(kernel.split()[0])]
    assert all(errors[name] <= 1.0 for name in unchanged)


def test_a_nan_in_one_dtype_does_not_get_lost() -> None:
    def nan_in_bf16(logits: Tensor, *of_rows: Any) -> None:
        torch_kernels.softmax_grad_(logits, *of_rows)
        if logits.dtype == torch.bfloat16 and logits.shape[1] % 16 == 0:  # the first of the two widths
            logits[0, 0] = torch.nan

    errors = compare_kernels(changed(softmax_grad_=nan_in_bf16), CPU)
    assert errors["softmax_grad bfloat16"] != errors["softmax_grad bfloat16"]
    assert errors["softmax_grad float16"] <= 1.0
