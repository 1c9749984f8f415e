"""Where the gradient of the head's weight goes: each slice of the vocabulary adds its own rows, once."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["ReturnedWeightGrad", "WeightGrad"]


class WeightGrad(Protocol):
    """The gradient of one backward pass. Made with the weight that forward used."""

    def add(
        self,
        columns: slice,  # which rows of the weight
        d_logits: Tensor,  # (rows, columns)
        rows: Tensor,  # (rows, hidden)
    ) -> None:
        """Take `d_logits.T @ rows` as the gradient of these rows of the weight. No other call has the same ones."""
        ...

    def finish(self) -> Tensor | None:
        """The gradient of the weight to return to autograd, if any."""
        ...


class ReturnedWeightGrad:
    """A gradient returned to autograd. Each row is one product in the weight's dtype; there is no fp32 copy."""

    def __init__(
        self,
        weight: Tensor,  # (vocab_local, hidden)
    ) -> None:
        self._total = weight.new_empty(weight.shape)
        self._written = 0

    def add(self, columns: slice, d_logits: Tensor, rows: Tensor) -> None:
        torch.mm(d_logits.t(), rows, out=self._total[columns])
        self._written = columns.stop

    def finish(self) -> Tensor:
        self._total[self._written :] = 0  # padding, which is in no slice
        return self._total
