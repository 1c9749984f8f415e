"""How the vocabulary is cut, and how many slices' logits are saved for backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["VocabSlices", "accumulation_dtype", "default_budget", "vocab_slices"]

# Bytes of logits: those saved for backward and the slice being computed. Every device but a CPU counts as a GPU.
_CPU_BUDGET, _GPU_BUDGET = 256 * 2**20, 2**30

# On a CPU a slice stays in cache between its product and the pass over it.
_CPU_SLICE = 4 * 2**20

_ALIGNMENT = 64  # columns


def default_budget(device: torch.device) -> int:
    """The default budget in bytes of logits: 1 GiB on a GPU, 256 MiB on a CPU."""
    return _CPU_BUDGET if device.type == "cpu" else _GPU_BUDGET


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What everything after a product is computed in: fp32, or fp64 where the input is fp64."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class VocabSlices:
    """`columns` of this rank in slices of `width` columns, the last one narrower. Forward saves the first `saved`.

    For each slice, backward adds a product to the gradient of all rows, so slices are as wide as the budget allows.
    """

    rows: int
    columns: int
    width: int
    saved: int

    def __len__(self) -> int:
        return -(-self.columns // self.width)

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, self.columns, self.width):
            yield slice(start, min(start + self.width, self.columns))

    def peak_logits(self, *, keep: bool) -> int:
        """The peak number of logits in memory in forward. With `keep`, the first `saved` slices are saved."""
        if keep and self.saved == len(self):
            return self.rows * self.columns
        return self.rows * min(self.width * (1 + keep * self.saved), self.columns)


def vocab_slices(
    rows: int,
    columns: int,
    hidden: int,
    dtype: torch.dtype,  # of the logits
    device: torch.device,
    budget: int | None = None,  # bytes; None for the device's default
) -> VocabSlices:
    """One slice if the budget holds all logits; else slices that take half of it at most, but no fewer than
    `max(64, hidden / 4)` columns: narrower ones would mostly spend time on the sum of the rows' fp32 gradient. Without
    rows there are no slices.

    The cut depends neither on gradients nor on the scalars computed, so that a no-grad pass and a training pass over
    the same rows give log-probs of the same bits. On a CPU, fp32 logits are cut into slices of 4 MiB, which fit in
    cache, even if the budget holds all of them.
    """
    budget = default_budget(device) if budget is None else budget
    columns = columns if rows else 0
    column_bytes = max(rows, 1) * dtype.itemsize
    fits = columns * column_bytes <= budget
    on_cpu = device.type == "cpu"
    if fits and not (on_cpu and dtype.itemsize >= 4):
        return VocabSlices(rows, columns, max(columns, 1), 1)
    most = min(budget // 2, _CPU_SLICE) if on_cpu else budget // 2
    width = max(most // column_bytes // _ALIGNMENT * _ALIGNMENT, _aligned(hidden // 4))
    count = -(-columns // width)
    width = _aligned(-(-columns // max(count, 1)))
    saved = count if fits else min(max(budget // (width * column_bytes) - 1, 0), count)
    return VocabSlices(rows, columns, width, saved)


def _aligned(columns: int) -> int:
    return max(-(-columns // _ALIGNMENT), 1) * _ALIGNMENT
