"""Peak bytes of a head of any size, without allocating it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from compact_logits.engine.linear import score_hidden
from compact_logits.engine.row_gather import Local, Replicated, RowGather, SequenceSharded
from compact_logits.engine.scorer import Scorer
from compact_logits.engine.vocab_shard import VocabShard
from compact_logits.engine.weight_grad import ReturnedWeightGrad
from compact_logits.errors import InputError
from compact_logits.memory.heads import full_head, full_topk_head
from compact_logits.memory.meta_collectives import meta_collectives
from compact_logits.memory.size import HeadBytes, HeadSize
from compact_logits.memory.tracker import StorageBytes
from compact_logits.rows import select
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from compact_logits.scorers.top_p import TopPMask, TopPScorer
from compact_logits.scorers.topk_scorer import TopKScorer

__all__ = ["Path", "simulate"]

Path = Literal["full", "compact"]


def simulate(size: HeadSize, path: Path) -> HeadBytes:
    """Run forward and backward of one path on meta tensors and count the storages. Nothing of that size is allocated.

    The compact path is the code that trains, cut as on a GPU. Under tensor parallelism its collectives run on a group
    of `size.tp` ranks that are not there, which needs a process without a process group: `InputError` otherwise.
    """
    with _group(size.tp if path == "compact" else 1) as group, StorageBytes(device="meta") as counted:
        local_rows = size.rows // size.tp if size.sequence_parallel else size.rows
        hidden = torch.empty(local_rows, size.hidden, dtype=size.dtype, device="meta", requires_grad=True)
        weight = torch.empty(size.vocab // size.tp, size.hidden, dtype=size.dtype, device="meta")
        weight.requires_grad_(not size.frozen)
        inputs = counted.live
        counted.restart_peak()
        outputs = _compact(size, hidden, weight, group) if path == "compact" else _full(size, hidden, weight)
        forward, saved = counted.peak - inputs, counted.live - inputs
        counted.restart_peak()
        torch.autograd.backward([output.sum() for output in outputs if output.requires_grad])
        return HeadBytes(forward=forward, saved=saved, backward=counted.peak - inputs)


def _compact(
    size: HeadSize,
    hidden: Tensor,  # (local rows, hidden)
    weight: Tensor,  # (vocab_local, hidden)
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, ...]:
    counts, kept, gather = size.shard_counts, size.kept, _gather(size, group)
    if isinstance(gather, SequenceSharded):
        kept = counts[0]
    return score_hidden(
        select(hidden, torch.zeros(kept, dtype=torch.int64, device="meta")),
        weight,
        None,
        _scorer(size, VocabShard(0, weight.shape[0], group)),
        gather=gather,
        group=group,
        weight_grad=_IntoMainGrad if size.fused else ReturnedWeightGrad,
        chunk_bytes=size.chunk_bytes,
    )


def _gather(size: HeadSize, group: dist.ProcessGroup | None) -> RowGather:
    if group is None:
        return Local()
    return SequenceSharded(group, size.shard_counts) if size.sequence_parallel else Replicated(group)


def _scorer(size: HeadSize, shard: VocabShard) -> Scorer:
    temperature = torch.full((size.kept,), 1.0 / size.temperature, device="meta")
    if size.top_k:
        return TopKScorer(
            teacher_log_probs=torch.empty(size.kept, size.top_k, device="meta"),
            teacher_ids=torch.empty(size.kept, size.top_k, dtype=torch.int64, device="meta"),
            shard=shard,
            inverse_temperature=temperature,
            log_prob_min_clamp=None,
            tail_mass_eps=None,
        )
    targets = torch.zeros(size.kept, dtype=torch.int64, device="meta")
    base = LogProbScorer(targets, shard, temperature, size.entropy)
    if not size.nucleus_ids:
        return base
    # The same ids in every row, spread evenly over the vocabulary.
    ids = torch.arange(size.nucleus_ids) * size.vocab // size.nucleus_ids
    return _EvenTopPScorer(base, TopPMask(ids=ids, row_of=torch.zeros_like(ids), recorded=torch.ones(1).bool()))


class _EvenTopPScorer(TopPScorer):
    """Every row has the ids that the mask lists for one: on the host stand these alone, whatever the number of rows."""

    @cached_property
    def _entries(self) -> _EvenEntries:  # type: ignore[override]
        return _EvenEntries.build(self.mask.ids, self.base)


@dataclass(frozen=True)
class _EvenEntries:
    """What `TopPScorer` reads of its entries."""

    row: Tensor  # (entries,) int64, meta, as all below but the last
    id: Tensor  # (entries,) int64
    is_target: Tensor  # (entries,) bool
    recorded: Tensor  # (rows,) bool
    ids_of_a_row: Tensor  # (ids,) int64, ascending, on the CPU

    @classmethod
    def build(cls, ids: Tensor, base: LogProbScorer) -> _EvenEntries:
        ids, targets = ids[(ids >= base.shard.start) & (ids < base.shard.stop)], base.targets
        pair = targets.new_empty(2, ids.shape[0] * targets.shape[0])
        return cls(pair[0], pair[1], pair[1] == targets[pair[0]], torch.empty_like(targets, dtype=torch.bool), ids)

    def run(self, first: int, columns: int) -> slice:
        start, stop = torch.searchsorted(self.ids_of_a_row, torch.tensor([first, first + columns])).tolist()
        return slice(start * self.recorded.shape[0], stop * self.recorded.shape[0])


class _IntoMainGrad:
    """A weight gradient that is added to memory which stands already, as Megatron's kernel does."""

    def __init__(self, weight: Tensor) -> None: ...

    def add(self, columns: slice, d_logits: Tensor, rows: Tensor) -> None: ...

    def finish(self) -> None: ...


def _full(
    size: HeadSize,
    hidden: Tensor,  # (local rows, hidden)
    weight: Tensor,  # (vocab_local, hidden)
) -> tuple[Tensor, ...]:
    if hidden.shape[0] != size.rows:
        hidden = torch.cat([hidden] * size.tp)  # the sequence-parallel gather
    # Fused, its gradient goes where memory stands already, and autograd makes none.
    used = weight.detach() if size.fused else weight
    if size.top_k:
        teacher = torch.empty(size.rows, size.top_k, device="meta")
        ids = torch.empty(size.rows, size.top_k, dtype=torch.int64, device="meta")
        return (full_topk_head(hidden, used, teacher, ids, temperature=size.temperature),)
    keep = None
    if size.nucleus_ids:
        keep = torch.empty(size.rows, used.shape[0], dtype=torch.bool, device="meta")
    return full_head(
        hidden,
        used,
        torch.zeros(size.rows, dtype=torch.int64, device="meta"),
        temperature=size.temperature,
        entropy_gradient=size.entropy == "loss",
        with_entropy=size.entropy != "none",
        keep=keep,
    )


@contextmanager
def _group(ranks: int) -> Iterator[dist.ProcessGroup | None]:
    if ranks == 1:
        yield None
        return
    # torch's own stand-in back end: collectives of the right shapes between ranks that do not exist.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise InputError("a simulation over several ranks needs a process without a process group; run it apart")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with meta_collectives():
            yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
