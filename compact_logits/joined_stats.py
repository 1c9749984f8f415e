"""The statistics of some rows, put together from those of one slice of the vocabulary after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from compact_logits.scorers.contract import Scorer

__all__ = ["JoinedStats"]

_ROWS_AT_ONCE = 16384  # so that what a row takes while it is joined does not count, however many rows there are


class JoinedStats:
    """`next` gives room for one slice's statistics, which are joined with those before, in fp64: the sums are rounded
    once, however many slices there are. With a single slice its statistics are the result."""

    def __init__(
        self,
        scorer: Scorer,
        slices: int,
        out: Tensor,  # (rows, stats_width), written by `finish` at the latest
    ) -> None:
        self._scorer, self._out = scorer, out
        self._parts = out[None] if slices == 1 else out.new_empty(2, *out.shape, dtype=torch.float64)
        self._used = 0

    def next(self) -> Tensor:  # (rows, stats_width)
        if self._used == 2:
            self._join(self._parts[0])
            self._used = 1
        self._used += 1
        return self._parts[self._used - 1]

    def finish(self) -> None:
        if self._used == 2:
            self._join(self._out)

    def _join(self, out: Tensor) -> None:
        for of_rows, parts in zip(out.split(_ROWS_AT_ONCE), self._parts.split(_ROWS_AT_ONCE, dim=1), strict=True):
            of_rows.copy_(self._scorer.combine(parts))
