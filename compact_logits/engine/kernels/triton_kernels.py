"""The kernels in Triton, for CUDA. What each computes is defined in `torch_kernels`.

Whole blocks are loaded without a mask: one that ends at an odd column would turn all loads into scalar ones.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compact_logits.engine.kernels.row_stats import LEAST_EXPONENT

__all__ = ["row_stats_", "softmax_grad_", "write_at_"]

_LEAST_EXPONENT = tl.constexpr(LEAST_EXPONENT)

_STATS_BLOCK, _GRAD_BLOCK, _WRITE_BLOCK = 4096, 2048, 256  # elements a program holds at a time


@triton.jit
def _row_stats_kernel(
    logits,  # (rows, columns), a row is contiguous
    stride,
    stats,  # (rows, WIDTH) fp64, contiguous
    inverse_temperature,  # (rows,) fp32
    columns,
    MOMENT: tl.constexpr,
    SQUARES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row: the online softmax of its columns in fp32, then merged with `stats` in fp64."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(inverse_temperature + row)
    here = logits + row * stride
    maximum = tl.full((), float("-inf"), tl.float32)
    total, moment, squares = 0.0, 0.0, 0.0
    whole = columns // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        z = tl.load(here + start + tl.arange(0, BLOCK)).to(tl.float32) * scale
        maximum, total, moment, squares = _add_block(z, maximum, total, moment, squares, MOMENT, SQUARES)
    if whole < columns:
        offsets = whole + tl.arange(0, BLOCK)
        z = tl.load(here + offsets, mask=offsets < columns, other=float("-inf")).to(tl.float32) * scale
        maximum, total, moment, squares = _add_block(z, maximum, total, moment, squares, MOMENT, SQUARES)

    out = stats + row * WIDTH
    before, maximum = tl.load(out), maximum.to(tl.float64)
    new = tl.maximum(before, maximum)
    base = tl.where(new == float("-inf"), 0.0, new)
    shift_before = tl.maximum(before - base, _LEAST_EXPONENT)
    shift = tl.maximum(maximum - base, _LEAST_EXPONENT)
    weight_before, weight = tl.exp(shift_before), tl.exp(shift)
    total_before, total = tl.load(out + 1), total.to(tl.float64)
    tl.store(out, new)
    tl.store(out + 1, weight_before * total_before + weight * total)
    if MOMENT:
        moment_before = weight_before * (tl.load(out + 2) + shift_before * total_before)
        tl.store(out + 2, moment_before + weight * (moment.to(tl.float64) + shift * total))
    if SQUARES:
        squares_before = weight_before * weight_before * tl.load(out + WIDTH - 1)
        tl.store(out + WIDTH - 1, squares_before + weight * weight * squares.to(tl.float64))


@triton.jit
def _add_block(
    z,  # (BLOCK,) fp32, -inf where there is no column
    maximum,
    total,
    moment,
    squares,
    MOMENT: tl.constexpr,
    SQUARES: tl.constexpr,
):
    new = tl.maximum(maximum, tl.max(z, 0))
    base = tl.where(new == float("-inf"), 0.0, new)  # a row of -inf so far
    shift = tl.maximum(maximum - base, _LEAST_EXPONENT)
    rescale = tl.exp(shift)
    z = z - base
    if MOMENT:
        z = tl.where(z < _LEAST_EXPONENT, _LEAST_EXPONENT, z)  # not tl.maximum: NaN must pass
    exp = tl.exp(z)
    if MOMENT:
        moment = rescale * (moment + shift * total) + tl.sum(z * exp, 0)
    if SQUARES:
        squares = rescale * rescale * squares + tl.sum(exp * exp, 0)
    return new, rescale * total + tl.sum(exp, 0), moment, squares


@triton.jit
def _softmax_grad_kernel(
    logits,  # (rows, columns), a row is contiguous
    stride,
    inverse_temperature,  # (rows,) fp32, as the three that follow
    shift,
    scale,
    slope,
    columns,
    SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    inverse, base = tl.load(inverse_temperature + row), tl.load(shift + row)
    factor, steepness = tl.load(scale + row), tl.load(slope + row)
    first = tl.program_id(1) * BLOCK
    offsets = first + tl.arange(0, BLOCK)
    here = logits + row * stride + offsets
    if first + BLOCK <= columns:
        grad = _grad_of_block(tl.load(here), inverse, base, factor, steepness, SLOPE)
        tl.store(here, grad.to(logits.dtype.element_ty))
    else:
        inside = offsets < columns
        grad = _grad_of_block(tl.load(here, mask=inside), inverse, base, factor, steepness, SLOPE)
        tl.store(here, grad.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _grad_of_block(logits, inverse, base, factor, steepness, SLOPE: tl.constexpr):
    z = logits.to(tl.float32) * inverse - base
    if SLOPE:
        factor = factor + steepness * tl.where(z < _LEAST_EXPONENT, _LEAST_EXPONENT, z)
    return tl.exp(z) * factor


@triton.jit(do_not_specialize=["first", "columns", "count", "total"])
def _write_at_kernel(
    logits,  # (rows, columns), a row is contiguous
    stride,
    ids,  # (rows, count) int64, contiguous
    values,  # (rows, count), contiguous
    first,
    columns,
    count,
    total,  # rows * count
    BLOCK: tl.constexpr,
):
    """One program a block of all rows' entries."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < total
    column = tl.load(ids + entry, mask=inside, other=-1) - first
    value = tl.load(values + entry, mask=inside)
    here = logits + (entry // count) * stride + column
    tl.store(here, value.to(logits.dtype.element_ty), mask=inside & (column >= 0) & (column < columns))


def row_stats_(stats: Tensor, logits: Tensor, inverse_temperature: Tensor, moment: bool, squares: bool) -> None:
    rows, columns = logits.shape
    block = _block(columns, _STATS_BLOCK)
    arguments = stats, inverse_temperature.contiguous(), columns, moment, squares, stats.shape[1], block
    _launch(_row_stats_kernel, (rows,), logits, *arguments, warps=8 if block > 1024 else 4)


def softmax_grad_(
    logits: Tensor, inverse_temperature: Tensor, shift: Tensor, scale: Tensor, slope: Tensor | None
) -> None:
    rows, columns = logits.shape
    block = _block(columns, _GRAD_BLOCK)
    of_rows = [each.contiguous() for each in (inverse_temperature, shift, scale, scale if slope is None else slope)]
    grid = (rows, triton.cdiv(columns, block))
    _launch(_softmax_grad_kernel, grid, logits, *of_rows, columns, slope is not None, block, warps=4)


def write_at_(logits: Tensor, ids: Tensor, values: Tensor, first: int) -> None:
    total = ids.numel()
    arguments = ids.contiguous(), values.contiguous(), first, logits.shape[1], ids.shape[1], total, _WRITE_BLOCK
    _launch(_write_at_kernel, (triton.cdiv(total, _WRITE_BLOCK),), logits, *arguments, warps=4)


def _block(columns: int, most: int) -> int:
    return min(most, max(128, triton.next_power_of_2(columns)))


def _launch(kernel: Any, grid: tuple[int, ...], logits: Tensor, *arguments: Any, warps: int) -> None:
    assert logits.stride(1) == 1 or logits.shape[1] == 1, f"a row must be contiguous, got strides {logits.stride()}"
    assert logits.dtype in (torch.float32, torch.bfloat16, torch.float16), logits.dtype
    with torch.cuda.device_of(logits):  # Triton launches on the current device, whatever the tensors' is
        # No fused multiply-add: `z - maximum`, with `z` a product, would not be 0 at the maximum.
        kernel[grid](logits, logits.stride(0), *arguments, num_warps=warps, enable_fp_fusion=False)
