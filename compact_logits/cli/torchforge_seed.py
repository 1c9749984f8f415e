"""torchforge's reported case without its memory: the uncompiled ways, run on tensors that have a shape alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from compact_logits.cli.torchforge_paths import Way, ways
from compact_logits.cli.torchforge_rank import Sizes
from compact_logits.memory.tracker import StorageBytes

__all__ = ["SEED_CASE", "Simulated", "simulate_ways"]

SEED_CASE = Sizes(
    batch=4,
    prompt=1024,
    response=8192,
    vocab=151_936,
    hidden=2048,
    dtype=torch.bfloat16,
    temperature=1.0,
    rounds=0,
    training=False,
)


@dataclass(frozen=True)
class Simulated:
    """Bytes of one rank beyond hidden states and weight."""

    name: str
    forward: int
    training: int  # most of forward and backward, gradients included


def simulate_ways(sizes: Sizes, ranks: int, root: str) -> list[Simulated]:
    """Count what each way holds on rank 0 of `ranks`. Needs a process without a process group.

    Compiled ways are left out: what a compiled kernel allocates, no operator shows.
    """
    # torch's own stand-in back end: collectives of the right shapes between ranks that do not exist.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        return [
            Simulated(way.name, _bytes(way, sizes, ranks, training=False), _bytes(way, sizes, ranks, training=True))
            for way in ways(root, sizes.temperature)
            if not way.compiled
        ]
    finally:
        dist.destroy_process_group()


class _LocalBytes(StorageBytes):
    """Counts what DTensor operators do on this rank. The DTensor itself, and the fake tensor by which torch works out
    its placement, have the whole's shape and no memory."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if isinstance(result, FakeTensor):
            return result
        return super().__torch_dispatch__(lambda *_, **__: result, types, args, kwargs)


def _bytes(way: Way, sizes: Sizes, ranks: int, *, training: bool) -> int:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    ids = torch.zeros(sizes.batch, sizes.response, dtype=torch.int64, device="meta")
    positions = sizes.prompt + sizes.response
    with _LocalBytes() as seen:
        rows = torch.empty(sizes.batch, positions, sizes.hidden, dtype=sizes.dtype, device="meta")
        head = torch.empty(-(-sizes.vocab // ranks), sizes.hidden, dtype=sizes.dtype, device="meta")
        hidden = DTensor.from_local(rows, mesh, [Replicate()], run_check=False)
        weight = DTensor.from_local(head, mesh, [Shard(0)], run_check=False)
        for leaf in (hidden, weight):
            leaf.requires_grad_(training)
        before = seen.live
        seen.restart_peak()
        with torch.set_grad_enabled(training), way.around():
            values = way.run(hidden, weight, ids)
            if training:
                values.sum().backward()
        return seen.peak - before
