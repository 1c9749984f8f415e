"""The scorer protocol, and the softmax gradient that all scorers use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from compact_logits.engine.kernels import softmax_grad_, write_at_
from compact_logits.engine.vocab_shard import VocabShard

__all__ = ["LogitsGrad", "Scorer", "SoftmaxGrad", "read_at_"]

_Stats = tuple[Tensor, ...]  # (rows, ...) each


class Scorer(Protocol):
    """Per-row scalars of logits that come slice by slice, from a vocabulary that may be sharded over ranks.

    Forward: `new_stats`, `add_slice_` once a slice, then `merge`, the only step with collectives. Backward:
    `logits_grad` once, and its `write_` once a slice.
    """

    @property
    def shard(self) -> VocabShard:
        """The ids that count on this rank. Columns from its size on are padding and are not projected."""
        ...

    @property
    def differentiable(self) -> tuple[bool, ...]:
        """For each output of `merge`, whether a gradient may come back for it."""
        ...

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The caller's tensors that backward reads. The engine saves them, so that autograd detects changes."""
        ...

    @property
    def writes_logits(self) -> bool:
        """Whether `add_slice_` writes to the logits."""
        ...

    def of_rows(
        self,
        rows: slice | Tensor,  # a Tensor is (kept,) int64
    ) -> Scorer:
        """The scorer of a subset of the rows."""
        ...

    def new_stats(self) -> _Stats:
        """The statistics of no columns."""
        ...

    def add_slice_(
        self,
        stats: _Stats,
        logits: Tensor,  # (rows, columns)
        first: int,  # the global id of the first column
    ) -> None:
        """Add the columns of a slice to the statistics. No device synchronisation."""
        ...

    def merge(
        self,
        stats: _Stats,  # of all of this rank's columns
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:  # outputs, (rows, ...) each; tensors saved for backward
        ...

    def logits_grad(
        self,
        saved: tuple[Tensor, ...],  # what merge returned
        grads: tuple[Tensor | None, ...],  # one an output, None where nothing came back
    ) -> LogitsGrad: ...


class LogitsGrad(Protocol):
    """Writes the gradient of the logits in place."""

    def of_rows(self, rows: slice) -> LogitsGrad: ...

    def write_(
        self,
        logits: Tensor,  # (rows, columns), overwritten by their gradient
        first: int,  # the global id of the first column
    ) -> None: ...


@dataclass(frozen=True)
class SoftmaxGrad:
    """`d_logits = exp(z - shift) * (scale + slope * (z - shift))`, but `values` at the `ids` of each row.

    At these ids a second term nearly cancels the first, as 1 and p do at a confident target. Adding the two in 16 bits
    would leave an error of 100% at p = .9999, so these values are computed apart and written last.
    """

    inverse_temperature: Tensor  # (rows,) fp32, fp64 for fp64 logits, as all below
    shift: Tensor  # (rows,)
    scale: Tensor  # (rows,)
    slope: Tensor | None  # (rows,)
    ids: Tensor  # (rows, k) int64, global; ids of other slices and ranks, and negative ones, are skipped
    values: Tensor  # (rows, k)

    def of_rows(self, rows: slice) -> SoftmaxGrad:
        return replace(self, **{name: each[rows] for name, each in vars(self).items() if each is not None})

    def write_(self, logits: Tensor, first: int) -> None:
        softmax_grad_(logits, self.inverse_temperature, self.shift, self.scale, self.slope)
        write_at_(logits, self.ids, self.values, first)


def read_at_(
    values: Tensor,  # (rows, k), written where an id is one of this slice's
    logits: Tensor,  # (rows, columns)
    ids: Tensor,  # (rows, k) int64, global
    first: int,
) -> None:
    """`values <- logits[row, ids[row] - first]` for the ids of this slice; other entries are not written."""
    if logits.shape[1] == 0:
        return
    columns = ids - first
    inside = columns % logits.shape[1]  # an id of another slice has some column too, which is not read
    torch.where(inside == columns, logits.gather(1, inside), values, out=values)
