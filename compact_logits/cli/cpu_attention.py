"""Causal attention over packed sequences in plain torch, for either way of cutting them for context parallelism."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["ContiguousAttention", "ZigzagAttention", "packed_positions"]


def packed_positions(
    cu_seqlens: Tensor,  # (sequences + 1), bounds of the sequences over all CP ranks
    *,
    cp_rank: int,
    cp_size: int,
    contiguous: bool,
) -> tuple[Tensor, Tensor]:  # each (rows)
    """For each row that a CP rank holds, in order: its position within its sequence, and the number of its sequence.

    Zigzag: each sequence is cut into `2 * cp_size` equal parts, and rank r holds the r-th and the r-th from the end.
    Contiguous: the whole pack is cut into `cp_size` equal parts. Raises `ValueError` where a cut does not come out.
    """
    bounds = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if contiguous:
        if bounds[-1] % cp_size:
            raise ValueError(f"contiguous CP cuts the pack into {cp_size} equal parts, got {bounds[-1]} rows; pad it")
        held = slice(bounds[-1] // cp_size * cp_rank, bounds[-1] // cp_size * (cp_rank + 1))
        position = torch.cat([torch.arange(length) for length in lengths])
        segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        return position[held], segment[held]
    parts: list[Tensor] = []
    owners: list[Tensor] = []
    for number, length in enumerate(lengths):
        if cp_size > 1 and length % (2 * cp_size):
            raise ValueError(f"zigzag CP cuts sequence {number} into {2 * cp_size} equal parts, got {length} rows")
        cuts = torch.arange(length).chunk(2 * cp_size) if cp_size > 1 and length else (torch.arange(length),)
        mine = cuts if len(cuts) == 1 else (cuts[cp_rank], cuts[-1 - cp_rank])
        parts += mine
        owners += [torch.full_like(part, number) for part in mine]
    return torch.cat(parts), torch.cat(owners)


class ZigzagAttention(torch.nn.Module):
    """Megatron's core attention: a row sees the rows of its own sequence up to its own position.

    Takes what Megatron hands over: `(rows, heads, dim)` with `packed_seq_params`, or `(rows, 1, heads, dim)`.
    With CP, keys and values of all ranks are gathered (two all-gathers; backward two all-reduces).
    """

    contiguous = False

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: Tensor,  # (rows, [1,] heads, dim)
        key: Tensor,  # (rows, [1,] groups, dim)
        value: Tensor,  # (rows, [1,] groups, dim)
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:  # (rows, [1,] heads * dim)
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        has_batch_axis = query.dim() == 4
        if has_batch_axis:
            query, key, value = (rearrange(x, "rows 1 heads dim -> rows heads dim") for x in (query, key, value))
        rows, size = query.shape[0], group.size()
        bounds = torch.tensor([0, rows * size]) if packed_seq_params is None else packed_seq_params.cu_seqlens_q
        held = [
            packed_positions(bounds, cp_rank=rank, cp_size=size, contiguous=self.contiguous) for rank in range(size)
        ]
        position, segment = held[group.rank()]
        assert len(position) == rows, f"cu_seqlens speak of {len(position)} rows on this CP rank, it holds {rows}"
        if size > 1:
            key, value = _GatherRows.apply(key, group), _GatherRows.apply(value, group)
        key_position, key_segment = (torch.cat(parts) for parts in zip(*held, strict=True))
        out = [
            _attend(query[mine], key[theirs], value[theirs], position[mine], key_position[theirs])
            for mine, theirs in ((segment == number, key_segment == number) for number in segment.unique().tolist())
        ]
        joined = rearrange(torch.cat(out), "rows heads dim -> rows (heads dim)")
        return rearrange(joined, "rows width -> rows 1 width") if has_batch_axis else joined


class ContiguousAttention(ZigzagAttention):
    """The same, where each CP rank holds one stretch of the whole pack."""

    contiguous = True


def _attend(
    query: Tensor,  # (rows, heads, dim)
    key: Tensor,  # (keys, groups, dim)
    value: Tensor,  # (keys, groups, dim)
    position: Tensor,  # (rows)
    key_position: Tensor,  # (keys)
) -> Tensor:  # (rows, heads, dim)
    share = query.shape[1] // key.shape[1]
    # With a batch axis torch has a fused kernel for the CPU, without it none.
    key, value = (repeat(x, "keys groups dim -> 1 (groups share) keys dim", share=share) for x in (key, value))
    query = rearrange(query, "rows heads dim -> 1 heads rows dim")
    if torch.equal(position, key_position):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    else:
        seen = key_position <= rearrange(position, "rows -> rows 1")
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    return rearrange(out, "1 heads rows dim -> rows heads dim")


class _GatherRows(torch.autograd.Function):
    """The rows of all ranks, in order of rank; backward, the sum over ranks of the gradient of the own rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (rows, ...)
        group: dist.ProcessGroup,
    ) -> Tensor:  # (ranks * rows, ...)
        ctx.group = group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None
