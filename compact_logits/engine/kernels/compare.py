"""How far other kernels are off the torch kernels, on a few small slices that are hard to get right."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from compact_logits.engine.kernels import torch_kernels
from compact_logits.engine.kernels.row_stats import new_stats

__all__ = ["compare_kernels"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Columns, and padding behind them. Rows of the first begin and end at multiples of 16 elements, as the engine's do, so
# that loads are wide; those of the second do not. Both take whole blocks and a part of one.
_WIDTHS = ((4864, 48), (4999, 10))

# Of a value in fp32. exp(z - M) differs that much where z - M = -80: Triton's is 2 to the power of a rounded product.
_BOUND = 1e-5

_PADDING = 50.0  # so large that whoever reads it or writes to it shows


def compare_kernels(kernels: ModuleType, device: torch.device) -> dict[str, float]:
    """The largest error over its bound, by kernel and dtype: at most 1 where `kernels` compute the same. NaN or
    infinity where one alone has NaN or infinity.

    The bound is 1e-5 of each value, and half a unit in the last place where a value is rounded to 16 bits.
    """
    worst: dict[str, float] = {}
    for dtype in _DTYPES:
        for columns, padding in _WIDTHS:
            first, second = (_hard_slice(columns, padding, dtype, device, seed) for seed in (0, 1))
            # A row of the second slice is another kind of row, and so are those that their statistics merge.
            slices = first, second.roll(1, dims=0)
            errors = {
                "row_stats": _error_of_stats(kernels, [each[:, :columns] for each in slices]),
                "softmax_grad": _error_of_grad(kernels, slices[0], columns, slope=False),
                "softmax_grad with slope": _error_of_grad(kernels, slices[0], columns, slope=True),
                "write_at": _error_of_write(kernels, slices[0], columns),
            }
            for name, error in errors.items():
                key = f"{name} {str(dtype).removeprefix('torch.')}"
                before = worst.get(key, 0.0)
                worst[key] = error if error != error or error > before else before
    return worst


def _hard_slice(
    columns: int, padding: int, dtype: torch.dtype, device: torch.device, seed: int
) -> Tensor:  # (rows, columns + padding)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(9, columns, generator=generator, device="cpu") * 4
    logits[1] = torch.linspace(-30, 30, columns, device="cpu")  # each block has a larger maximum than all before
    logits[2] = -logits[1]
    logits[3, columns // 2] = 60.0  # has all probability but for e-20
    logits[4, ::3] = -torch.inf  # masked columns
    logits[5] = -torch.inf
    logits[6, : columns - columns // 8] = -torch.inf  # the first block has nothing
    logits[7, columns // 3] = torch.nan
    logits[8, columns // 3] = torch.inf
    return torch.nn.functional.pad(logits, (0, padding), value=_PADDING).to(device, dtype)


def _error_of_stats(
    kernels: ModuleType,
    slices: list[Tensor],  # (rows, columns) each
) -> float:
    inverse, errors = _of_rows(slices[0], 0.7, 1.4), []
    for moment, squares in ((False, False), (True, True)):
        truth, got = (new_stats(inverse, moment=moment, squares=squares) for _ in range(2))
        for logits in slices:
            torch_kernels.row_stats_(truth, logits.float(), inverse, moment, squares)
            kernels.row_stats_(got, logits, inverse, moment, squares)
        # Where a row has NaN, its sums say so; the maximum need not.
        known = truth[:, 1:].isfinite().all(dim=1)
        errors.append(_error(got[:, 1:], truth[:, 1:], torch.float32))
        maximum, largest = (each[:, 0].masked_fill(~known, 0.0) for each in (got, truth))
        errors.append(_error(maximum, largest, torch.float32))
    return float(torch.stack(errors).max())


def _error_of_grad(
    kernels: ModuleType,
    padded: Tensor,  # (rows, columns + padding)
    columns: int,
    *,
    slope: bool,
) -> float:
    inverse, scale = _of_rows(padded, 0.7, 1.4), _of_rows(padded, -0.3, -1.2)
    steepness = _of_rows(padded, 0.2, 2.0) if slope else None  # of this sign, the two terms do not cancel
    z = padded[:, :columns].float() * inverse[:, None]
    shift = z.masked_fill(~z.isfinite(), -torch.inf).amax(dim=1)
    shift = shift.masked_fill(shift == -torch.inf, 0.0) + _of_rows(padded, 0.0, 1.0)
    truth, got = padded.float(), padded.clone()
    torch_kernels.softmax_grad_(truth[:, :columns], inverse, shift, scale, steepness)
    kernels.softmax_grad_(got[:, :columns], inverse, shift, scale, steepness)
    return float(_error(got, truth, padded.dtype))


def _error_of_write(
    kernels: ModuleType,
    padded: Tensor,  # (rows, columns + padding)
    columns: int,
) -> float:
    rows, first = padded.shape[0], 100
    ids = [first - 1, first, first + columns // 2, first + columns - 1, first + columns, 3, -1]  # of other slices too
    listed = torch.tensor([ids], device=padded.device).repeat(rows, 1)
    listed[:, 2] += torch.arange(rows, device=padded.device)
    values = _of_rows(padded, 0.1, 1.0)[:, None] + torch.arange(len(ids), device=padded.device) / 7
    truth, got = padded.float(), padded.clone()
    torch_kernels.write_at_(truth[:, :columns], listed, values, first)
    kernels.write_at_(got[:, :columns], listed, values, first)
    return float(_error(got, truth, padded.dtype))


def _of_rows(like: Tensor, low: float, high: float) -> Tensor:  # (rows,) fp32
    return torch.linspace(low, high, like.shape[0], device=like.device)


def _error(
    got: Tensor,  # (...)
    truth: Tensor,  # (...) fp32 or wider
    dtype: torch.dtype,  # in which `got` was rounded
) -> Tensor:  # () fp64
    rounding = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    # Below the normal numbers, a unit in the last place is the same for all.
    least = max(torch.finfo(dtype).tiny * rounding, 1e-35)
    got, truth = got.double(), truth.double()
    error = (got - truth).abs() / ((rounding + _BOUND) * truth.abs() + least)
    return error.masked_fill((got == truth) | (got.isnan() & truth.isnan()), 0.0).max()
