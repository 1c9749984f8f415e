"""How the gradient of the head's weight is summed over chunks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from compact_logits.chunks import work_dtype

__all__ = ["ReturnedWeightGrad", "WeightGrad", "accumulate_product_"]

# What is widened at a time: no more than this, and than a small part of the chunk, so that the budget holds.
_UPCAST_BYTES = 8 * 2**20
_UPCAST_PART = 32


class WeightGrad(Protocol):
    """Receives one product a chunk; says at the end what autograd is to be given for the weight."""

    def begin(self, weight: Tensor, chunks: int) -> None: ...

    def add(
        self,
        d_logits: Tensor,  # (chunk, vocab_local)
        hidden: Tensor,  # (chunk, hidden)
    ) -> None: ...

    def finish(self) -> Tensor | None: ...


def accumulate_product_(
    total: Tensor,  # (vocab_local, hidden) fp32
    d_logits: Tensor,  # (chunk, vocab_local)
    hidden: Tensor,  # (chunk, hidden)
) -> None:
    """`total += d_logits.T @ hidden`, the products of low-precision factors summed in the dtype of `total`."""
    if total.dtype == d_logits.dtype:
        total.addmm_(d_logits.t(), hidden)
        return
    if d_logits.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.ops.aten.addmm.dtype_out(total, d_logits.t(), hidden, total.dtype, out=total)
        return
    # No product with a wider result here: widen the factors, a slice of the vocabulary at a time. Rounding each
    # chunk's product to the model's dtype instead would let the error grow with the number of chunks.
    wide_hidden = hidden.to(total.dtype)
    most = min(_UPCAST_BYTES, d_logits.nbytes // _UPCAST_PART)
    step = max(most // (total.dtype.itemsize * max(d_logits.shape[0], 1)), 1)
    for start in range(0, total.shape[0], step):
        wide = d_logits[:, start : start + step].to(total.dtype)
        total[start : start + step].addmm_(wide.t(), wide_hidden)


class ReturnedWeightGrad:
    """Plain autograd: summed in fp32, returned in the weight's dtype. With one chunk there is nothing to sum, and the
    product is formed in the weight's dtype at once, as the plain path does."""

    def begin(self, weight: Tensor, chunks: int) -> None:
        self._weight = weight
        self._single = chunks == 1
        self._total: Tensor | None = None

    def add(self, d_logits: Tensor, hidden: Tensor) -> None:
        work = work_dtype(self._weight.dtype)
        if self._single or (self._total is None and work == self._weight.dtype):
            # Not added to zeros, which would first have to be written. With `out`, autocast around backward cannot give
            # it a dtype of its own.
            self._total = torch.mm(d_logits.t(), hidden, out=self._weight.new_empty(self._weight.shape))
            return
        if self._total is None:
            self._total = torch.zeros_like(self._weight, dtype=work)
        accumulate_product_(self._total, d_logits, hidden)

    def finish(self) -> Tensor:
        total = torch.zeros_like(self._weight) if self._total is None else self._total
        self._total = None
        weight = self._weight
        del self._weight
        return total.to(weight.dtype)
