"""How many rows of logits are held at once, and the scratch they are held in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from compact_logits.config import DEFAULT_CHUNK_BYTES

__all__ = ["ChunkPlan", "Scratch", "plan_chunks", "work_dtype"]

# A block is what the scorer's passes walk over again and again: on a CPU it should stay in a core's cache, elsewhere
# it should be large enough that launching the passes costs nothing.
_BLOCK_BYTES = {"cpu": 2**20}
_BLOCK_BYTES_ELSEWHERE = 32 * 2**20


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype everything after the product is computed in: fp32, or fp64 where the input is fp64."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class ChunkPlan:
    """`rows` in chunks of at most `chunk` rows, each walked in blocks of at most `block` rows.

    The plan depends on the sizes and the budget alone, not on whether gradients are wanted, so that a no-grad pass and
    a training pass over the same rows run the same products and give the same bits.
    """

    rows: int
    chunk: int
    block: int

    def chunks(self) -> Iterator[slice]:
        for start in range(0, self.rows, self.chunk):
            yield slice(start, min(start + self.chunk, self.rows))

    def blocks(self, chunk: slice) -> Iterator[tuple[slice, slice]]:
        """Blocks of a chunk: where in the chunk, and which rows of all."""
        for start in range(chunk.start, chunk.stop, self.block):
            stop = min(start + self.block, chunk.stop)
            yield slice(start - chunk.start, stop - chunk.start), slice(start, stop)

    def bytes_in_forward(self, vocab_local: int, dtype: torch.dtype, *, keeps: bool, spare: bool) -> int:
        """The most bytes of logits that stand at one time in a forward pass, which `keeps` some for backward or not."""
        if not self.rows:
            return 0
        blocks = (keeps or dtype != work_dtype(dtype)) + spare
        return vocab_local * (self.chunk * dtype.itemsize + blocks * self.block * work_dtype(dtype).itemsize)


def plan_chunks(
    rows: int,
    vocab_local: int,
    dtype: torch.dtype,
    device: torch.device,
    chunk_bytes: int | None,
) -> ChunkPlan:
    """Split `chunk_bytes` into two blocks of fp32 scratch and a chunk in the model's dtype. At least one row is held,
    however small the budget."""
    budget = DEFAULT_CHUNK_BYTES if chunk_bytes is None else chunk_bytes
    work_row = max(vocab_local, 1) * work_dtype(dtype).itemsize
    row = max(vocab_local, 1) * dtype.itemsize
    block_bytes = min(_BLOCK_BYTES.get(device.type, _BLOCK_BYTES_ELSEWHERE), budget // 16)
    block = max(block_bytes // work_row, 1)
    most = max((budget - 2 * block * work_row) // row, 1)
    # Equal chunks: a short last chunk would cost a whole GEMM's start-up for few rows.
    count = max(-(-rows // most), 1)
    chunk = max(-(-rows // count), 1)
    return ChunkPlan(rows=rows, chunk=chunk, block=min(block, chunk))


class Scratch:
    """The buffers of one pass, each made when first asked for and reused after: a chunk of logits, in the dtype of
    `like` unless another is named, for which memory may be `given`; a block in the working dtype; a block to spare."""

    def __init__(
        self,
        plan: ChunkPlan,
        vocab_local: int,
        like: Tensor,
        given: Tensor | None = None,
        logits_dtype: torch.dtype | None = None,
    ) -> None:
        self._plan, self._vocab_local, self._like = plan, vocab_local, like
        self._logits_dtype = like.dtype if logits_dtype is None else logits_dtype
        self._buffers: dict[str, Tensor] = {} if given is None else {"chunk": given}

    def chunk(self, rows: int) -> Tensor:  # (rows, vocab_local), the logits' dtype
        return self._buffer("chunk", self._plan.chunk, self._logits_dtype)[:rows]

    def block(self, rows: int) -> Tensor:  # (rows, vocab_local), the working dtype
        return self._buffer("block", self._plan.block, work_dtype(self._like.dtype))[:rows]

    def spare(self, rows: int) -> Tensor:  # (rows, vocab_local), the working dtype
        return self._buffer("spare", self._plan.block, work_dtype(self._like.dtype))[:rows]

    def _buffer(self, name: str, rows: int, dtype: torch.dtype) -> Tensor:
        if name not in self._buffers:
            self._buffers[name] = self._like.new_empty(rows, self._vocab_local, dtype=dtype)
        return self._buffers[name]
