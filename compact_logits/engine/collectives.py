"""The two collectives that torch 2.13 renamed, called by the name that this torch has. The old names warn there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["all_gather", "start_reduce_scatter"]


def all_gather(
    received: Tensor,  # (ranks * rows, ...), contiguous
    sent: Tensor,  # (rows, ...), contiguous
    group: ProcessGroup,
) -> None:
    """Fill `received` with what all ranks sent, in rank order. One all-gather."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(received, sent, group=group)


def start_reduce_scatter(
    received: Tensor,  # (rows, ...), contiguous
    sent: Tensor,  # (ranks * rows, ...), contiguous
    group: ProcessGroup,
) -> Any:  # the work handle
    """Start to fill `received` with this rank's part of the sum over the ranks. One reduce-scatter."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(received, sent, group=group, async_op=True)
