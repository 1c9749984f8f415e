"""The matrix products of the engine, by what this version of torch offers on this device."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from compact_logits.engine.slices import accumulation_dtype
from compact_logits.errors import InputError

__all__ = ["add_product_", "project", "unrounded_dtype"]

logger = logging.getLogger("compact_logits")

_WIDENED_BYTES = 8 * 2**20  # of a factor that is cast to fp32, at a time


def unrounded_dtype(
    rows: Tensor,  # (rows, hidden)
) -> torch.dtype:
    """The dtype of logits that are not rounded to 16 bits: fp32, or that of the rows if it is no narrower.

    Raises `InputError` where torch has no product of 16-bit factors with an fp32 result on this device.
    """
    dtype = accumulation_dtype(rows.dtype)
    if dtype != rows.dtype and _fp32_products(rows) == "none":
        raise InputError(
            f"fp32 logits of {rows.dtype} need a product with an fp32 result, which torch 2.8 and newer has on CUDA; "
            f"got a tensor on {rows.device.type} and torch {torch.__version__}; leave fp32_logits off"
        )
    return dtype


def project(
    rows: Tensor,  # (rows, hidden)
    weight: Tensor,  # (columns, hidden)
    bias: Tensor | None,  # (columns,)
    dtype: torch.dtype,  # of the result: that of the rows, or fp32 where `unrounded_dtype` gives it
) -> Tensor:  # (rows, columns), own storage
    """`rows @ weight.T + bias`, rounded once, as by a linear layer."""
    logits = rows.new_empty(rows.shape[0], weight.shape[0], dtype=dtype)
    # With `out`, an autocast around backward can't give the product a dtype of its own.
    if dtype != rows.dtype:
        torch.ops.aten.mm.dtype_out(rows, weight.t(), dtype, out=logits)
        return logits if bias is None else logits.add_(bias)
    if bias is None:
        return torch.mm(rows, weight.t(), out=logits)
    return torch.addmm(bias, rows, weight.t(), out=logits)


def add_product_(
    total: Tensor,  # (m, n), of the factors' dtype or fp32
    left: Tensor,  # (m, k)
    right: Tensor,  # (k, n)
) -> None:
    """`total += left @ right`, accumulated in the dtype of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
        return
    products = _fp32_products(left)
    if products == "addmm":
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    elif products == "baddbmm":
        torch.ops.aten.baddbmm.dtype_out(total[None], left[None], right[None], total.dtype, out=total[None])
    else:
        if left.is_cuda:
            _warn_of_widening()
        _add_widened_(total, left, right)


def _fp32_products(factor: Tensor) -> str:
    """How 16-bit factors are multiplied and added to an fp32 sum here: `"addmm"`, `"baddbmm"` or `"none"`.

    The `addmm` of torch 2.8 and 2.9 takes `out_dtype` and then refuses an fp32 sum. Meta tensors count as
    tensors on a GPU, for memory simulations; `baddbmm` with `out_dtype` refuses them.
    """
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if not (factor.is_cuda or factor.is_meta) or version < (2, 8):
        return "none"
    if version >= (2, 10):
        return "addmm"
    return "none" if factor.is_meta else "baddbmm"


def _add_widened_(
    total: Tensor,  # (m, n) fp32
    left: Tensor,  # (m, k) 16 bits
    right: Tensor,  # (k, n) 16 bits
) -> None:
    """`total += left @ right` with the factors cast to fp32, 8 MiB of each at a time: whole casts may need more memory
    than the logits."""
    most = _WIDENED_BYTES // total.dtype.itemsize
    inner = max(most // max(right.shape[1], 1), 1)
    height = max(most // max(min(inner, left.shape[1]), 1), 1)
    for first in range(0, left.shape[1], inner):
        part = slice(first, first + inner)
        wide = right[part].to(total.dtype)
        for start in range(0, left.shape[0], height):
            some = slice(start, start + height)
            total[some].addmm_(left[some, part].to(total.dtype), wide)


@functools.cache
def _warn_of_widening() -> None:
    logger.warning(
        "torch %s has no product of 16-bit factors with an fp32 result: the factors are cast to fp32, which is several "
        "times as slow; torch 2.8 and newer has one",
        torch.__version__,
    )
