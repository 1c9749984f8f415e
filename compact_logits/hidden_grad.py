"""How the gradient of some rows' hidden states is put together from the chunks' products."""

from __future__ import annotations

import torch
from torch import Tensor

from compact_logits.chunk_product import add_product_
from compact_logits.chunks import ChunkPlan, work_dtype

__all__ = ["HiddenGrad"]


class HiddenGrad:
    """Every slice of the vocabulary adds one product: in fp32, rounded once, or with a single slice in the dtype of the
    hidden states at once, as the plain path does."""

    def __init__(
        self,
        out: Tensor,  # (rows, hidden), written by `finish` at the latest
        plan: ChunkPlan,
    ) -> None:
        self._out, self._widened = out, plan.widened
        work = work_dtype(out.dtype)
        self._total = out if plan.num_slices == 1 or work == out.dtype else torch.zeros_like(out, dtype=work)
        self._empty = self._total is out

    def add(
        self,
        d_logits: Tensor,  # (rows, columns)
        weight: Tensor,  # (columns, hidden)
    ) -> None:
        if self._empty:
            torch.mm(d_logits, weight, out=self._total)
            self._empty = False
        else:
            add_product_(self._total, d_logits, weight, widened=self._widened)

    def finish(self) -> None:
        if self._total is not self._out:
            self._out.copy_(self._total)
            self._total = self._out  # the sum's memory is free for that of the next rows
