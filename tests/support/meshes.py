"""Device meshes for tests on gloo ranks, made once a process, and DTensors cut as their placements say."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

__all__ = ["cut", "mesh_of"]

# In torch 2.6 rank 0's tensor always goes to the others, which here have the same one.
_NO_BROADCAST: dict[str, Any] = (
    {"src_data_rank": None} if "src_data_rank" in inspect.signature(distribute_tensor).parameters else {}
)


@functools.cache
def mesh_of(*sizes: int) -> DeviceMesh:
    """The mesh of these sizes over all ranks, its axes named dp, tp (or tp alone, or pp, dp, tp)."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp")[-len(sizes) :])


def cut(tensor: Tensor, mesh: DeviceMesh, placements: list[Placement], *, grad: bool = False) -> DTensor:
    """The same tensor on every rank, as a DTensor leaf."""
    return distribute_tensor(tensor, mesh, placements, **_NO_BROADCAST).requires_grad_(grad)
