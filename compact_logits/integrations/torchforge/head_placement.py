"""How hidden states and a head's weight lie on a mesh together, and which positions each rank has."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from compact_logits.engine.dtensor import VocabPlacement, chunk_bounds
from compact_logits.engine.row_gather import SequenceSharded
from compact_logits.engine.vocab_shard import VocabShard
from compact_logits.errors import InputError

__all__ = ["HeadPlacement", "Positions"]


@dataclass(frozen=True)
class Positions:
    """The positions of a window, rank by rank of those that share them: `counts[r]` are on rank `r`, in order."""

    local: slice  # of this rank's positions
    counts: tuple[int, ...]
    gather: SequenceSharded | None  # None where every rank has all positions

    def in_order(
        self,
        ids: Tensor,  # (batch, positions of the window)
    ) -> Tensor:  # (rows,), in the order in which the rows are projected: rank by rank, each batch by batch
        parts = ids.split(self.counts, dim=1)
        return torch.cat([rearrange(part, "batch position -> (batch position)") for part in parts])

    def back(
        self,
        values: Tensor,  # (rows,)
        batch: int,
    ) -> Tensor:  # (batch, positions of the window)
        parts = values.split([batch * count for count in self.counts])
        return torch.cat([part.view(batch, count) for part, count in zip(parts, self.counts, strict=True)], dim=1)


@dataclass(frozen=True)
class HeadPlacement:
    """`rows` is `None` where both are plain tensors; else it says where ids and results lie."""

    rows: VocabPlacement | None
    by_position: bool  # hidden is sharded on its positions by the vocabulary's mesh axis
    by_batch: tuple[int, ...]  # mesh axes that shard the batch

    @classmethod
    def of(
        cls,
        hidden: Tensor,  # (batch, positions, hidden)
        weight: Tensor,  # (vocab, hidden)
    ) -> HeadPlacement:
        """Raise `InputError` unless the placements say which rows and which ids this rank has. No collective."""
        if not isinstance(weight, DTensor):
            if isinstance(hidden, DTensor):
                raise InputError("hidden is a DTensor and lm_head_weight a plain tensor; pass both in the same form")
            return cls(rows=None, by_position=False, by_batch=())
        rows = VocabPlacement.of(weight, dim=0, row_dims=(), name="lm_head_weight")
        if not isinstance(hidden, DTensor):
            others = [axis for axis in range(rows.mesh.ndim) if axis != rows.axis and rows.mesh.size(axis) > 1]
            if others:
                raise InputError(
                    f"a plain hidden does not say whether its rows differ over mesh axes {others} of lm_head_weight, "
                    f"{rows.mesh}; pass a DTensor, or a weight on the tensor-parallel axis alone"
                )
            return cls(rows=rows, by_position=False, by_batch=())
        if hidden.device_mesh != rows.mesh:
            raise InputError(f"hidden lies on {hidden.device_mesh}, needed the weight's mesh, {rows.mesh}")
        by_position, by_batch = False, []
        for axis, placement in enumerate(hidden.placements):
            if placement == Shard(1) and axis == rows.axis:
                by_position = True
            elif placement == Shard(0) and axis != rows.axis:
                by_batch.append(axis)
            elif not isinstance(placement, Replicate):
                allowed = "Replicate() or Shard(1)" if axis == rows.axis else "Replicate() or Shard(0)"
                raise InputError(f"hidden is {placement} on mesh axis {axis}, needed {allowed} there; redistribute it")
        return cls(replace(rows, placements=tuple(hidden.placements)), by_position, tuple(by_batch))

    @property
    def shard(self) -> VocabShard | None:
        return None if self.rows is None else self.rows.shard

    def localize_hidden(
        self,
        hidden: Tensor,  # (batch, positions, hidden)
    ) -> Tensor:  # (local batch, local positions, hidden)
        return hidden.to_local(grad_placements=hidden.placements) if isinstance(hidden, DTensor) else hidden

    def localize(
        self,
        parameter: Tensor,  # (vocab, ...), the weight or the bias
    ) -> Tensor:  # (vocab_local, ...)
        """This rank's slice, differentiable: its gradient is summed over the axes that shard the batch."""
        if not isinstance(parameter, DTensor):
            return parameter
        if not self.by_batch:
            return parameter.to_local(grad_placements=parameter.placements)
        # Redistributing to where it is costs nothing, and in backward sums what is partial.
        partial = [Partial() if axis in self.by_batch else p for axis, p in enumerate(parameter.placements)]
        return parameter.redistribute(placements=parameter.placements).to_local(grad_placements=partial)

    def positions(
        self,
        window: slice,  # of all positions
        batch: int,
        total: int,
    ) -> Positions:
        """Which positions of the window each rank of the vocabulary's axis has. No collective."""
        if not self.by_position:
            return Positions(window, (window.stop - window.start,), None)
        assert self.rows is not None and self.rows.axis is not None and self.rows.shard.group is not None
        mesh, axis = self.rows.mesh, self.rows.axis
        parts = [_cut(window, *chunk_bounds(total, mesh.size(axis), rank)) for rank in range(mesh.size(axis))]
        counts = tuple(part.stop - part.start for part in parts)
        gather = SequenceSharded(self.rows.shard.group, tuple(batch * count for count in counts))
        return Positions(parts[mesh.get_local_rank(axis)], counts, gather)


def _cut(window: slice, start: int, stop: int) -> slice:
    """The part of the window that lies in `[start, stop)`, counted from `start`."""
    first = min(max(window.start, start), stop)
    return slice(first - start, max(min(window.stop, stop), first) - start)
