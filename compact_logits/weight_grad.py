"""How the gradient of the head's weight is put together from the chunks' products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from compact_logits.chunk_product import add_product_
from compact_logits.chunks import ChunkPlan, work_dtype

__all__ = ["ReturnedSum", "ReturnedWeightGrad", "WeightGrad", "WeightSum"]


class WeightGrad(Protocol):
    """Where the gradient goes."""

    @property
    def lends(self) -> bool:
        """Whether it can be formed in memory that is given."""
        ...

    @property
    def sums_in_place(self) -> bool:
        """Whether a sum of several products takes no fp32 memory of its own."""
        ...

    def begin(
        self,
        weight: Tensor,  # (vocab_local, hidden)
        plan: ChunkPlan,
        memory: Tensor | None = None,  # like the weight, to form the gradient in, from the first rows on
    ) -> WeightSum:
        """The sum of one backward pass, of nothing yet."""
        ...


class WeightSum(Protocol):
    """Receives one product a chunk; says at the end what autograd is to be given for the weight."""

    def add(
        self,
        d_logits: Tensor,  # (rows, columns)
        hidden: Tensor,  # (rows, hidden)
        columns: slice,  # which of the weight's rows
    ) -> None: ...

    def finish(self) -> Tensor | None: ...


@dataclass(frozen=True)
class ReturnedWeightGrad:
    """Plain autograd's."""

    lends: bool = True
    frozen: bool = False  # there is none

    @property
    def sums_in_place(self) -> bool:
        return self.frozen

    def begin(self, weight: Tensor, plan: ChunkPlan, memory: Tensor | None = None) -> WeightSum:
        return ReturnedSum(weight, plan, memory)


class ReturnedSum:
    """Where each row of the weight is one product, that is formed in the weight's dtype at once, as the plain path
    does; else summed in fp32 and returned in the weight's dtype."""

    def __init__(self, weight: Tensor, plan: ChunkPlan, memory: Tensor | None) -> None:
        self._weight, self._widened = weight, plan.widened
        self._rounded = len(plan.groups()) > 1 and work_dtype(weight.dtype) != weight.dtype
        # Not of zeros where nothing is added to it, since they would first have to be written.
        self._total = torch.zeros_like(weight, dtype=work_dtype(weight.dtype)) if self._rounded else memory
        self._written = 0

    def add(self, d_logits: Tensor, hidden: Tensor, columns: slice) -> None:
        if self._total is None:
            self._total = self._weight.new_empty(self._weight.shape)
        first = not self._rounded and self._written < self._weight.shape[0]
        self._written += columns.stop - columns.start
        if first:
            # With `out`, autocast around backward cannot give it a dtype of its own.
            torch.mm(d_logits.t(), hidden, out=self._total[columns])
        else:
            add_product_(self._total[columns], d_logits.t(), hidden, widened=self._widened)

    def finish(self) -> Tensor:
        total = torch.zeros_like(self._weight) if self._total is None else self._total
        self._total = None
        return total.to(self._weight.dtype)
