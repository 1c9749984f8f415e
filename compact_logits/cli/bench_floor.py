"""The floor: the products of the kept rows alone, which no way of computing the head can leave out."""

from __future__ import annotations

import torch
from torch import Tensor

from compact_logits.cli.bench_case import Case, Inputs

__all__ = ["Floor"]

_MOST_BYTES = 2**30


class Floor:
    """Three products (logits, and the two gradients of a product), or four, where backward forms the logits again.

    Into buffers that stand before the clock starts, and over as many rows at once as fit 1 GiB of logits, so that
    nothing but the products is timed. The second and later parts add to the weight's gradient in place.
    """

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self._weight = inputs.weight
        self._rows = inputs.hidden[inputs.rows]
        self._step = max(_MOST_BYTES // (case.vocab * case.dtype.itemsize), 1)
        self._logits = self._rows.new_empty(min(self._step, case.kept), case.vocab)
        self._d_rows, self._d_weight = torch.empty_like(self._rows), torch.empty_like(self._weight)

    def forward(self) -> None:
        for rows in self._rows.split(self._step):
            self._project(rows)

    def backward(self, *, recompute: bool) -> None:
        for place, (rows, d_rows) in enumerate(
            zip(self._rows.split(self._step), self._d_rows.split(self._step), strict=True)
        ):
            d_logits = self._project(rows) if recompute else self._logits[: rows.shape[0]]
            torch.mm(d_logits, self._weight, out=d_rows)
            if place:
                self._d_weight.addmm_(d_logits.t(), rows)
            else:
                torch.mm(d_logits.t(), rows, out=self._d_weight)

    def _project(self, rows: Tensor) -> Tensor:
        return torch.mm(rows, self._weight.t(), out=self._logits[: rows.shape[0]])
