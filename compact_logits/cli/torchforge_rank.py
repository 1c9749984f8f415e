"""One rank of torchforge's bench: the gate, then time and memory of every way in turn."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from compact_logits.cli.torchforge_paths import Way, gathered_definition, ways
from compact_logits.engine.dtensor import chunk_bounds

__all__ = ["Measured", "Sizes", "bench_rank"]


@dataclass(frozen=True)
class Sizes:
    batch: int
    prompt: int
    response: int
    vocab: int
    hidden: int
    dtype: torch.dtype
    temperature: float
    rounds: int
    training: bool  # forward and backward; else forward alone, without gradients


@dataclass
class Measured:
    """`failure`: why the way gave no result, or a wrong one; then there are no numbers."""

    name: str
    compiled: bool
    failure: str = ""
    time_ms: float = 0.0
    peak_mib: float = 0.0
    errors: list[float] = field(default_factory=list)  # of values, d hidden, d weight, relative to the largest


def bench_rank(
    rank: int, world: int, init_method: str, tick: Callable[[], None], sizes: Sizes, root: str, compiled: bool
) -> list[Measured]:
    """Measure every way on this rank, the compiled ones on request.

    Errors are against fp64; a way further off than the gate allows is not timed.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    try:
        inputs = _inputs(sizes)
        truth = _truth(sizes, *inputs)
        found, timed = [], []
        for way in ways(root, sizes.temperature):
            if way.compiled and not compiled:
                continue
            result = Measured(way.name, way.compiled)
            found.append(result)
            try:
                result.errors = _errors(_results(way, mesh, sizes, *inputs), truth)
            except Exception as error:
                result.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                continue
            finally:
                tick()
            limit = 1e-5 if sizes.dtype == torch.float32 else 2e-2
            if max(result.errors) > limit:
                result.failure = f"off by {max(result.errors):.1e} of the largest, {limit:.0e} allowed"
            else:
                timed.append((way, result))
        for way, result in timed:
            result.peak_mib = _peak_mib(partial(_results, way, mesh, sizes, *inputs))
            tick()
        times: dict[int, list[float]] = {id(result): [] for _, result in timed}
        for _ in range(sizes.rounds):  # in turn, so that a slow moment of the machine meets all of them
            for way, result in timed:
                dist.barrier()
                start = time.perf_counter()
                _results(way, mesh, sizes, *inputs)
                times[id(result)].append((time.perf_counter() - start) * 1e3)
                tick()
        for _, result in timed:
            result.time_ms = median(times[id(result)])
        return found
    finally:
        dist.destroy_process_group()


def _inputs(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, ids and the gradient that comes back; alike on every rank."""
    torch.manual_seed(0)
    hidden = torch.randn(sizes.batch, sizes.prompt + sizes.response, sizes.hidden).to(sizes.dtype)
    weight = (torch.randn(sizes.vocab, sizes.hidden) / sizes.hidden**0.5).to(sizes.dtype)
    ids = torch.randint(0, sizes.vocab, (sizes.batch, sizes.response))
    return hidden, weight, ids, torch.randn(sizes.batch, sizes.response)


def _truth(sizes: Sizes, hidden: Tensor, weight: Tensor, ids: Tensor, upstream: Tensor) -> list[Tensor]:
    """Values, and with training the gradients of hidden and weight, in fp64, a sequence at a time."""
    head = weight.double().requires_grad_()
    values, d_hidden = [], []
    for rows, own_ids, own_upstream in zip(hidden.double(), ids, upstream.double(), strict=True):
        leaf = rows[None].requires_grad_()
        own = gathered_definition(leaf @ head.T, own_ids[None], sizes.temperature)
        own.backward(own_upstream[None])
        values.append(own.detach())
        d_hidden.append(leaf.grad)
    assert head.grad is not None
    gradients = [torch.cat([grad for grad in d_hidden if grad is not None]), head.grad]
    return [torch.cat(values), *(gradients if sizes.training else [])]


def _results(
    way: Way, mesh: DeviceMesh, sizes: Sizes, hidden: Tensor, weight: Tensor, ids: Tensor, upstream: Tensor
) -> list[Tensor]:
    # Every rank has the whole tensors: to distribute them would send rank 0's, in torch 2.6 always.
    whole: Any = {"run_check": False, "shape": weight.shape, "stride": weight.stride()}
    mine = weight[slice(*chunk_bounds(weight.shape[0], mesh.size(), mesh.get_local_rank()))].clone()
    leaves: list[Any] = [
        DTensor.from_local(hidden, mesh, [Replicate()], run_check=False).detach().requires_grad_(sizes.training),
        DTensor.from_local(mine, mesh, [Shard(0)], **whole).requires_grad_(sizes.training),
    ]
    with torch.set_grad_enabled(sizes.training), way.around():
        values = way.run(leaves[0], leaves[1], ids)
        if sizes.training:
            values.backward(upstream)
    grads = [leaf.grad for leaf in leaves if sizes.training]
    return [values.detach(), *[grad for grad in grads if isinstance(grad, DTensor)]]


def _errors(results: list[Tensor], truth: list[Tensor]) -> list[float]:
    found = []
    for result, true in zip(results, truth, strict=True):
        whole = result.full_tensor() if isinstance(result, DTensor) else result
        found.append(((whole.double() - true).abs().max() / true.abs().max()).item())
    return found


def _peak_mib(run: Callable[[], object]) -> float:
    """The most resident memory that `run` adds, by the kernel's count: compiled code passes torch's by."""
    run()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
    before = _status_mib("VmRSS")
    run()
    return _status_mib("VmHWM") - before


def _status_mib(key: str) -> float:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(key + ":"))
    return int(line.split()[1]) / 1024
