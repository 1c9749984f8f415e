"""The products of a chunk: its logits, in the model's dtype or in fp32, and what it adds to a sum in fp32."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from compact_logits.errors import InputError

__all__ = ["add_product_", "narrowed", "project", "wide_dtype"]

# What of each factor is widened at a time: no more than this.
_UPCAST_BYTES = 8 * 2**20
# Both together take no more than this part of the first factor, where nobody says how many bytes they may take.
_UPCAST_PART = 8

_ADDEND_BYTES = 64 * 2**20


def wide_dtype(
    rows: Tensor,  # (rows, hidden)
) -> torch.dtype:
    """The dtype of logits that are not rounded to 16 bits: fp32, or that of the rows if it is no narrower.

    Raises `InputError` where the device offers no product of 16-bit factors with an fp32 result.
    """
    dtype = torch.promote_types(rows.dtype, torch.float32)
    if dtype != rows.dtype and not _offers_wide_product(rows):
        raise InputError(
            f"fp32 logits of {rows.dtype} need a product with an fp32 result, which torch 2.8 and newer has on CUDA; "
            f"got a tensor on {rows.device.type} and torch {torch.__version__}; leave fp32_logits off"
        )
    return dtype


def project(
    rows: Tensor,  # (chunk, hidden)
    weight: Tensor,  # (vocab_local, hidden)
    bias: Tensor | None,  # (vocab_local,)
    out: Tensor,  # (chunk, vocab_local), as wide as the rows or wider
) -> Tensor:  # `out`
    """`rows @ weight.T + bias`."""
    if out.dtype != rows.dtype:
        _wide_product(rows, weight.t(), out)
        return out if bias is None else out.add_(bias)
    if bias is None:
        return torch.mm(rows, weight.t(), out=out)
    # In one operation, as a linear layer: a sum rounded after the product was rounded is off by twice as much.
    return torch.addmm(bias, rows, weight.t(), out=out)


def narrowed(
    logits: Tensor,  # (chunk, vocab_local), contiguous
    dtype: torch.dtype,
) -> Tensor:  # (chunk, vocab_local)
    """The same memory, as far as it is needed, for the same number of elements of `dtype`.

    Written in ascending order from a copy, a block of rows never reaches into logits that are still to be read.
    """
    if logits.dtype == dtype:
        return logits
    return logits.view(-1).view(dtype)[: logits.numel()].view(logits.shape)


def add_product_(
    total: Tensor,  # (m, n), of the factors' dtype or wider
    left: Tensor,  # (m, k)
    right: Tensor,  # (k, n)
    *,
    widened: int = 0,  # bytes that parts of the factors may take, where they have to be widened
) -> None:
    """`total += left @ right`, the products of low-precision factors summed in the dtype of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
        return
    if _offers_wide_product(left):
        _add_wide_product(total, left, right)
        return
    # No product with a wider result here: widen the factors, a part at a time. Rounding each product to the factors'
    # dtype instead would let the error grow with the number of chunks.
    m, k = left.shape
    most = min(_UPCAST_BYTES, (widened or left.nbytes // _UPCAST_PART) // 2) // total.dtype.itemsize
    inner = min(max(most // max(right.shape[1], 1), 1), max(k, 1))
    step = max(most // inner, 1)
    for first in range(0, k, inner):
        part = slice(first, first + inner)
        wide = right[part].to(total.dtype)
        for start in range(0, m, step):
            total[start : start + step].addmm_(left[start : start + step, part].to(total.dtype), wide)


def _offers_wide_product(rows: Tensor) -> bool:
    return rows.is_cuda and hasattr(torch.ops.aten.mm, "dtype_out")


def _wide_product(
    left: Tensor,  # (m, k)
    right: Tensor,  # (k, n)
    out: Tensor,  # (m, n) fp32
) -> None:
    torch.ops.aten.mm.dtype_out(left, right, out.dtype, out=out)


def _add_wide_product(
    total: Tensor,  # (m, n) fp32
    left: Tensor,  # (m, k)
    right: Tensor,  # (k, n)
) -> None:
    if _adds_to_wide(left.dtype, left.device):
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
        return
    step = max(_ADDEND_BYTES // (total.dtype.itemsize * max(total.shape[1], 1)), 1)
    product = total.new_empty(min(step, total.shape[0]), total.shape[1])
    for start in range(0, total.shape[0], step):
        part = total[start : start + step]
        _wide_product(left[start : start + step], right, product[: part.shape[0]])
        part.add_(product[: part.shape[0]])


@functools.cache
def _adds_to_wide(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch adds a product of 16-bit factors to an fp32 sum: some that have the operation take only a sum
    of the factors' dtype, which its signature does not tell."""
    factor, total = torch.zeros(8, 8, dtype=dtype, device=device), torch.zeros(8, 8, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, factor, factor, total.dtype, out=total)
    except (AttributeError, RuntimeError):
        return False
    return True
