"""How many logits are held at once, and the scratch they are held in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compact_logits.config import DEFAULT_CHUNK_BYTES

__all__ = ["Block", "ChunkPlan", "Scratch", "plan_blocks", "plan_chunks", "work_dtype"]

# A block is what the scorer's passes walk over again and again: on a CPU it should stay in a core's cache, elsewhere
# it should be large enough that launching the passes costs nothing.
_BLOCK_BYTES = {"cpu": 4 * 2**20}
_BLOCK_BYTES_ELSEWHERE = 32 * 2**20

# Where a chunk of this size stays in a core's cache from the product to the passes, no larger one is made; not even of
# logits that all fit, unless several chunks cost a sum that is wider than the rows.
_CHUNK_BYTES = {"cpu": 4 * 2**20}
# Elsewhere the budget is shared by so many at the most, so that forward can leave as many as it holds; but none is
# smaller than that.
_MOST_HELD = 8
_CHUNK_BYTES_ELSEWHERE = 32 * 2**20

# Each chunk adds to the gradient of all its rows, which costs more than the product where a chunk is narrower: rows are
# cut rather than that. And the budget is not shared by so many chunks that they get narrower than is good.
_LEAST_WIDTH = {"cpu": 16}
_LEAST_WIDTH_ELSEWHERE = 2048
# Where adding to the weight's gradient, too, needs no sum in a wider dtype, so many rows are enough for wider slices.
_FAIR_WIDTH = {"cpu": 256}
_ENOUGH_ROWS = 4096
_GOOD_WIDTH = 1024

# Where no product of 16-bit factors has an fp32 result, this part of the budget is for factors that are widened.
_WIDENED_PART = {"cpu": 8}

_MOST_BLOCKS = 2  # of scratch, that any pass needs

_ALIGNED = 64  # columns, so that rows of a chunk begin where matrix products like them to


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype everything after the product is computed in: fp32, or fp64 where the input is fp64."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class ChunkPlan:
    """`rows` of `columns` logits in chunks of at most `height` rows and `width` columns; the budget holds `held` of
    them at one time, or more than there are. Each is walked in blocks of at most `block` rows.

    As a rule `height` is all rows: a chunk is then a slice of the vocabulary, whose part of the weight's gradient is
    one product, formed once. The rows are cut where a slice would get too narrow for the budget, and where an fp32 sum
    of the rows' gradient over the slices would take more memory than one of the weight's over groups of rows.

    The chunks depend on the sizes, the budget and where the weight's gradient goes, not on whether gradients or an
    entropy are wanted, so that a no-grad pass and a training pass over the same rows run the same products and give
    log-probs of the same bits.
    """

    rows: int
    columns: int
    height: int
    width: int
    held: int
    block: int
    widened: int = 0  # bytes that are left for parts of 16-bit factors where they have to be widened

    def groups(self) -> list[slice]:
        """Which rows stand in one chunk."""
        return [slice(start, min(start + self.height, self.rows)) for start in range(0, self.rows, self.height)]

    def slices(self) -> list[slice]:
        """Which columns stand in one chunk; one empty slice where there are no columns."""
        return [slice(start, min(start + self.width, self.columns)) for start in self._starts]

    @property
    def num_slices(self) -> int:
        return len(self._starts)

    @property
    def _starts(self) -> range:
        return range(0, max(self.columns, 1), max(self.width, 1))

    def logits_in(self, places: int, *, last: bool = True) -> int:
        """How many logits stand in so many places for a chunk, the last one being the `last` slice's alone or not."""
        least = self.columns - self._starts[-1] if last and places > 1 else self.width
        return self.height * ((places - 1) * self.width + least) if places else 0

    def blocks(self, rows: int) -> Iterator[slice]:
        """Blocks of a chunk with so many rows, counted from its first one."""
        for start in range(0, rows, self.block):
            yield slice(start, min(start + self.block, rows))

    def bytes_in_forward(self, dtype: torch.dtype, *, keeps: bool, blocks: int) -> int:
        """The most bytes of logits that stand at one time in a forward pass, which `keeps` some for backward or not,
        and works on that many blocks of scratch."""
        if not self.rows:
            return 0
        work = work_dtype(dtype)
        logits = self.logits_in(min(self.held, self.num_slices) if keeps else 1)
        return logits * dtype.itemsize + self.width * blocks * self.block * work.itemsize


def plan_chunks(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    chunk_bytes: int | None,
    *,
    blocks: int = _MOST_BLOCKS,
    row_sum: int = 0,
) -> ChunkPlan:
    """Split `chunk_bytes` into blocks of fp32 scratch, of which the passes need so many, and chunks in the model's
    dtype. As much as one row takes is held however small the budget. What the passes need decides over `held` alone.

    `row_sum` is what a row of an fp32 sum over slices takes, in bytes, where cutting the rows spares memory: chunks are
    then of all columns and need no such sum, or slices of more rows, where that is less work, and the sum stands in the
    budget.
    """
    row, work_row = dtype.itemsize, work_dtype(dtype).itemsize  # bytes of one column
    budget, block_bytes = _budget(device, chunk_bytes, least=max(columns, 1) * (row + _MOST_BLOCKS * work_row))
    widened = budget // _WIDENED_PART[device.type] if device.type in _WIDENED_PART and work_row > row else 0
    most = budget - _MOST_BLOCKS * block_bytes - widened
    least_width = max(min(columns, _LEAST_WIDTH.get(device.type, _LEAST_WIDTH_ELSEWHERE)), 1)

    def fitting(width: int) -> int:  # rows; besides a chunk there are the blocks, of one row each at the least
        return max(min(most // (row * width), (budget // width - _MOST_BLOCKS * work_row) // row), 1)

    def of_all_columns(height: int, widened: int) -> ChunkPlan:
        return ChunkPlan(rows, columns, height, columns, 1, _block(block_bytes, columns * work_row, height), widened)

    tallest = fitting(least_width)
    if row == work_row:
        tallest = min(tallest, max(fitting(_FAIR_WIDTH.get(device.type, least_width)), _ENOUGH_ROWS))
    height = _equal(rows, tallest)
    fits = rows * columns * row + _MOST_BLOCKS * max(block_bytes, columns * work_row) <= budget and height >= rows
    if fits and not (device.type in _CHUNK_BYTES and row == work_row):
        return of_all_columns(height, 0)
    if row_sum:
        summed, passes = _least_passes(rows, columns, row, row_sum, max(most, 0))
        by_all_columns = fitting(max(columns, 1))
        if -(-rows // by_all_columns) * columns <= passes:
            return of_all_columns(_equal(rows, by_all_columns), widened)
        budget, most = budget - summed * row_sum, most - summed * row_sum
        height = _equal(rows, min(fitting(least_width), summed))
    good_bytes = max(_CHUNK_BYTES.get(device.type, _CHUNK_BYTES_ELSEWHERE), min(_GOOD_WIDTH, columns) * height * row)
    shares = max(most // good_bytes, 1)
    if device.type not in _CHUNK_BYTES:
        shares = 1 if row_sum else min(shares, _MOST_HELD)
    width = min(most // (shares * height * row), budget // (height * row + _MOST_BLOCKS * work_row))
    width = min(max(width, least_width), columns)
    if _ALIGNED < width < columns:
        width -= width % _ALIGNED
    some = max(width, 1)
    held = max((budget - widened - blocks * max(block_bytes, some * work_row)) // (height * some * row), 1)
    return ChunkPlan(rows, columns, height, width, held, _block(block_bytes, some * work_row, height), widened)


def plan_blocks(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    chunk_bytes: int | None,
) -> ChunkPlan:
    """Of logits that exist already: one chunk that is all of them, whose blocks follow from the budget."""
    _, block_bytes = _budget(device, chunk_bytes)
    block = _block(block_bytes, columns * work_dtype(dtype).itemsize, max(rows, 1))
    return ChunkPlan(rows, columns, max(rows, 1), columns, 1, block)


def _budget(device: torch.device, chunk_bytes: int | None, least: int = 0) -> tuple[int, int]:  # of all, of a block
    budget = max(DEFAULT_CHUNK_BYTES if chunk_bytes is None else chunk_bytes, least)
    return budget, min(_BLOCK_BYTES.get(device.type, _BLOCK_BYTES_ELSEWHERE), budget // 16)


def _block(block_bytes: int, row_bytes: int, height: int) -> int:
    return min(max(block_bytes // max(row_bytes, 1), 1), height)


def _equal(total: int, most: int) -> int:
    """The size of equal parts of at most `most`: a short last part would cost a whole product's start-up for little."""
    return max(-(-total // max(-(-total // most), 1)), 1)


def _least_passes(rows: int, columns: int, row: int, row_sum: int, most: int) -> tuple[int, int]:
    """The height of groups whose sum fills the memory together with a slice, and how many rows of gradients are then
    added to: every group goes through all the weight's, every slice through the group's.

    With `height * (row_sum + width * row) = most` that is least for a width of `sqrt(most / row)`.
    """

    def passes(height: int) -> int:
        width = max((most - height * row_sum) // (height * row), 1)
        return -(-rows // height) * columns + -(-columns // width) * rows

    groups = rows / max(most / (row_sum + math.sqrt(row * most)), 1)
    height = min((max(-(-rows // count), 1) for count in (max(int(groups), 1), int(groups) + 1)), key=passes)
    return height, passes(height)


class Scratch:
    """The buffers of one pass besides the chunks, each made when first asked for and used again after: a block in the
    working dtype, and one to spare."""

    def __init__(self, plan: ChunkPlan, like: Tensor) -> None:
        self._plan, self._like = plan, like
        self._buffers: dict[str, Tensor] = {}

    def block(self, rows: int, columns: int) -> Tensor:  # (rows, columns), the working dtype
        return self._buffer("block", rows, columns)

    def spare(self, rows: int, columns: int) -> Tensor:  # (rows, columns), the working dtype
        return self._buffer("spare", rows, columns)

    def _buffer(self, name: str, rows: int, columns: int) -> Tensor:
        if name not in self._buffers:
            dtype = work_dtype(self._like.dtype)
            self._buffers[name] = self._like.new_empty(self._plan.block, self._plan.width, dtype=dtype)
        return self._buffers[name].view(-1)[: rows * columns].view(rows, columns)


class Block(NamedTuple):
    """Some rows of a chunk, and the scratch to work on them in."""

    logits: Tensor  # (block, columns), fp32 or narrower; read only, unless it is `z`
    z: Tensor  # (block, columns) fp32, overwritten; in backward by the gradient of the logits
    spare: Tensor | None  # (block, columns) fp32, for scorers that need it
    rows: slice  # which of all rows the block holds
