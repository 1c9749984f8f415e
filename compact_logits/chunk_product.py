"""The product that forms a chunk of logits, in the model's dtype or in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from compact_logits.errors import InputError

__all__ = ["narrowed", "project", "wide_dtype"]


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
        _wide_product(rows, weight, out)
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


def _offers_wide_product(rows: Tensor) -> bool:
    return rows.is_cuda and hasattr(torch.ops.aten.mm, "dtype_out")


def _wide_product(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    torch.ops.aten.mm.dtype_out(rows, weight.t(), out.dtype, out=out)
