"""From a DTensor's placements to this rank's slice of the vocabulary, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from compact_logits.engine.vocab_shard import VocabShard
from compact_logits.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["VocabPlacement", "chunk_bounds"]


def chunk_bounds(size: int, chunks: int, index: int) -> tuple[int, int]:  # start, stop
    """The bounds of one chunk by the rule of `torch.chunk` and `Shard`.

    All chunks have one size, except that the last one with any entries may be shorter and those after it are empty.
    """
    step = -(-size // chunks)
    return min(index * step, size), min((index + 1) * step, size)


@dataclass(frozen=True)
class VocabPlacement:
    """One tensor dimension is the vocabulary: sharded on the mesh axis `axis`, or whole on each rank if that is `None`.

    On every other mesh axis the tensor is replicated, or sharded on a dimension that holds rows.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]  # of the tensor it was read from
    axis: int | None
    vocab: int  # the whole vocabulary's size
    shard: VocabShard

    @classmethod
    def of(
        cls,
        tensor: DTensor,
        dim: int,
        row_dims: tuple[int, ...],
        name: str = "logits",
    ) -> VocabPlacement:
        """Read where the vocabulary, dimension `dim`, lies; `row_dims` may be sharded as well. No collective.

        Raises `InputError` for all other placements: `Partial`, two mesh axes over the vocabulary, strided shards
        (what FSDP2 makes of a tensor-parallel weight), a shard of another dimension, a rank outside the
        mesh, and a local tensor that is not the slice its placement gives.
        """
        mesh, dim, axis = tensor.device_mesh, dim % tensor.dim(), None
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise InputError(f"this rank is not part of the mesh of {name}, {mesh}; call on its ranks only")
        for mesh_axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Replicate):
                continue
            if isinstance(placement, Partial):
                raise InputError(
                    f"{name} is {_described(tensor)}: a Partial value is not summed yet; "
                    f"redistribute it to Replicate() or Shard() on mesh axis {_axis_name(mesh, mesh_axis)} first"
                )
            # Not isinstance: in some versions of torch a strided shard is a kind of Shard.
            if type(placement) is not Shard:
                raise InputError(
                    f"{name} is {_described(tensor)}: needed Shard or Replicate on every mesh axis; a weight that "
                    f"FSDP2 shards is whole inside its module only: pass the module instead of its weight"
                )
            sharded = placement.dim % tensor.dim()
            if sharded == dim and axis is not None:
                raise InputError(
                    f"{name} is {_described(tensor)}: the vocabulary, dimension {dim}, is sharded on two mesh axes; "
                    f"redistribute it to one"
                )
            if sharded == dim:
                axis = mesh_axis
            elif sharded not in row_dims:
                raise InputError(
                    f"{name} is {_described(tensor)}: dimension {sharded} is sharded on mesh axis "
                    f"{_axis_name(mesh, mesh_axis)}; needed Replicate() there"
                )
        vocab = tensor.shape[dim]
        start, stop = (0, vocab) if axis is None else chunk_bounds(vocab, mesh.size(axis), coordinate[axis])
        local = tensor.to_local().shape[dim]
        if local != stop - start:
            raise InputError(
                f"{name} is {_described(tensor)}, of which this rank's slice is [{start}, {stop}), but its local "
                f"tensor holds {local}; build uneven shards with distribute_tensor, or from_local with shape and stride"
            )
        group = None if axis is None else mesh.get_group(axis)
        return cls(mesh, tuple(tensor.placements), axis, vocab, VocabShard(start, stop, group))

    @property
    def row_placements(self) -> tuple[Placement, ...]:
        """The placements of per-row results: the tensor's, but replicated on the vocabulary's mesh axis."""
        return tuple(Replicate() if axis == self.axis else p for axis, p in enumerate(self.placements))

    def is_sharded(self, dim: int) -> bool:
        """Whether some mesh axis shards this dimension."""
        return any(isinstance(p, Shard) and p.dim == dim for p in self.placements)

    def local_rows(
        self,
        rows: Tensor,  # (batch, positions), one entry for each row of the tensor
        name: str,
    ) -> Tensor:  # (local batch, local positions)
        """This rank's part of `rows`: for a DTensor, by the placements of the results; for a plain tensor, all of it.

        No collective: a replicated DTensor is sliced, and one that would need a gather is an `InputError`.
        """
        if not isinstance(rows, DTensor):
            return rows
        if rows.device_mesh != self.mesh:
            raise InputError(f"{name} lies on {rows.device_mesh}, needed the mesh of the other input, {self.mesh}")
        if rows.placements != self.row_placements:
            if not all(isinstance(placement, Replicate) for placement in rows.placements):
                raise InputError(
                    f"{name} is {_described(rows)}; needed {list(self.row_placements)}, or Replicate() throughout"
                )
            rows = rows.redistribute(placements=self.row_placements)
        return rows.to_local()

    def shared_rows(
        self,
        local: Tensor,  # (local batch, local positions)
        like: DTensor,  # (batch, positions)
    ) -> DTensor:  # (batch, positions)
        """Per-row results as a DTensor of the mesh, differentiable. No collective."""
        stride = (like.shape[1], 1)
        return DTensor.from_local(
            local, self.mesh, self.row_placements, run_check=False, shape=like.shape, stride=stride
        )


def _described(tensor: DTensor) -> str:
    placed = ", ".join(f"{p} on {_axis_name(tensor.device_mesh, axis)}" for axis, p in enumerate(tensor.placements))
    return f"{tuple(tensor.shape)} with {placed}"


def _axis_name(mesh: DeviceMesh, axis: int) -> str:
    return repr(mesh.mesh_dim_names[axis]) if mesh.mesh_dim_names else str(axis)
