"""Peak bytes of a head of any size, without allocating it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from compact_logits.engine.slices import ChunkPlan
from compact_logits.errors import InputError
from compact_logits.engine.row_gather import Local, Replicated, RowExchange, SequenceSharded, Wait
from compact_logits.held_logits import lending_pays
from compact_logits.memory.heads import full_head, full_topk_head
from compact_logits.memory.meta_collectives import meta_collectives
from compact_logits.memory.size import HeadBytes, HeadSize
from compact_logits.memory.tracker import StorageBytes
from compact_logits.engine.linear import plan_for, score_hidden
from compact_logits.rows import select
from compact_logits.engine.scorer import Scorer
from compact_logits.scorers.log_prob_scorer import LogProbScorer
from compact_logits.scorers.top_p import TopPMask, TopPScorer
from compact_logits.scorers.topk_scorer import TopKScorer
from compact_logits.engine.vocab_shard import VocabShard
from compact_logits.engine.weight_grad import ReturnedWeightGrad, WeightGrad, WeightSum

__all__ = ["Path", "simulate"]

Path = Literal["full", "compact"]
_Run = Callable[[Callable[[], None]], tuple[Tensor, ...]]  # is given what ends a moment


def simulate(size: HeadSize, path: Path) -> HeadBytes:
    """Run forward and backward of one path on meta tensors and count the storages. Nothing of that size is allocated.

    The compact path is the code that trains. Of many groups of rows, and of many slices of the vocabulary, a few less
    are run, since to each moment of a step every further one adds the same bytes. Under tensor parallelism its
    collectives run on a group of `size.tp` ranks that are not there, which needs a process without a process group:
    `InputError` otherwise.
    """
    plan = _plan(size)
    if path == "full":
        return _worst(_run(size, path, plan))
    weight = torch.empty(size.vocab // size.tp, size.hidden, dtype=size.dtype, device="meta")
    lends = not size.fused and not size.frozen and lending_pays(plan, weight, size.dtype)
    return _worst(_run(size, path, plan, lends=True) if lends else _compact_moments(size, plan))


def _compact_moments(size: HeadSize, plan: ChunkPlan) -> list[HeadBytes]:
    """Of a head whose logits never stand in the memory of the weight's gradient."""
    slices, least = len(plan.slices()), plan.held + 2
    if len(plan.groups()) > 3:
        two, three = (_of(size.keeping(count * plan.height, size.rows), plan) for count in (2, 3))
        times = (size.kept - three[0].kept) / plan.height
    elif slices > least + 1:
        two, three = (
            _of(replace(size, vocab=size.vocab - (slices - count) * plan.width * size.tp), plan)
            for count in (least, least + 1)
        )
        times = slices - least - 1
    else:
        return _run(size, "compact", plan)
    shorter, longer = _compact_moments(*two), _compact_moments(*three)
    return [more.extended(less, times) for more, less in zip(longer, shorter, strict=True)]


class _FewBlocks(ChunkPlan):
    """A plan of whose blocks two are walked: the others, being of the same size as the first, hold no more."""

    def blocks(self, rows: int) -> Iterator[slice]:
        every = list(super().blocks(rows))
        return iter(every[:1] + every[1:][-1:])


def _plan(size: HeadSize) -> ChunkPlan:
    scorer, sums = _scorer(size, VocabShard(0, 1), rows=0), size.fused or size.frozen
    weight = torch.empty(size.vocab // size.tp, size.hidden, dtype=size.dtype, device="meta")
    plan = plan_for(scorer, size.kept, weight, size.dtype, size.chunk_bytes, sums_in_place=sums)
    return _FewBlocks(**vars(plan))


def _of(size: HeadSize, plan: ChunkPlan) -> tuple[HeadSize, ChunkPlan]:
    """A smaller head in chunks of the same size."""
    return size, replace(plan, rows=size.kept, columns=size.vocab // size.tp)


def _worst(moments: list[HeadBytes]) -> HeadBytes:
    return HeadBytes(
        forward=max(moment.forward for moment in moments),
        saved=moments[0].saved,
        backward=max(moment.backward for moment in moments),
    )


class _Stopwatch:
    """Of bytes: `stop` ends a moment and begins the next."""

    def __init__(self, bytes_: StorageBytes) -> None:
        self._bytes = bytes_
        self._inputs = bytes_.live
        self.moments: list[int] = []
        bytes_.restart_peak()

    def stop(self) -> None:
        self.moments.append(self._bytes.peak - self._inputs)
        self._bytes.restart_peak()


def _run(size: HeadSize, path: Path, plan: ChunkPlan, *, lends: bool = False) -> list[HeadBytes]:
    """The bytes of each moment of forward and of backward, first with first.

    One by one they are straight lines in the number of groups, and of slices. Their maximum is not: which moment is the
    worst changes.
    """
    with _group(size.tp if path == "compact" else 1) as group, StorageBytes(device="meta") as bytes_:
        local_rows = size.rows // size.tp if size.sequence_parallel else size.rows
        hidden = torch.empty(local_rows, size.hidden, dtype=size.dtype, device="meta", requires_grad=True)
        weight = torch.empty(size.vocab // size.tp, size.hidden, dtype=size.dtype, device="meta")
        weight.requires_grad_(not size.frozen)
        grad = _IntoMainGrad() if size.fused else ReturnedWeightGrad(lends=lends)
        run = _compact(size, plan, hidden, weight, group, grad) if path == "compact" else _full(size, hidden, weight)
        inputs = bytes_.live
        watch = _Stopwatch(bytes_)
        outputs = run(watch.stop)
        watch.stop()
        saved, forward = bytes_.live - inputs, len(watch.moments)
        torch.autograd.backward([output.sum() for output in outputs if output.requires_grad])
        watch.stop()
        pairs = zip(watch.moments[:forward], watch.moments[forward:], strict=True)
        return [HeadBytes(before, saved, after) for before, after in pairs]


def _compact(
    size: HeadSize,
    plan: ChunkPlan,
    hidden: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None,
    grad: WeightGrad,
) -> _Run:
    counts = size.shard_counts
    sharded = size.sequence_parallel and group is not None
    exchange: RowExchange = Local()
    if group is not None:
        exchange = SequenceSharded(group, counts) if size.sequence_parallel else Replicated(group)
    scorer = _scorer(size, VocabShard(0, weight.shape[0], group), size.kept)

    def run(stop: Callable[[], None]) -> tuple[Tensor, ...]:
        indices = torch.zeros(counts[0] if sharded else size.kept, dtype=torch.int64, device="meta")
        rows = select(hidden, indices)
        rows.register_hook(lambda _: stop())  # between the backward of the projection and that of the selection
        return score_hidden(
            rows,
            weight,
            None,
            scorer,
            exchange=_Watched(exchange, stop),
            group=group,
            weight_grad=grad,
            plan=plan,
        )

    return run


def _scorer(size: HeadSize, shard: VocabShard, rows: int) -> Scorer:
    if size.top_k:
        shape = rows, size.top_k
        return TopKScorer(
            teacher_log_probs=torch.empty(shape, device="meta"),
            teacher_ids=torch.empty(shape, dtype=torch.int64, device="meta"),
            shard=shard,
            temperature=size.temperature,
            log_prob_min_clamp=None,
            tail_mass_eps=None,
        )
    base = LogProbScorer(
        targets=torch.zeros(rows, dtype=torch.int64, device="meta"),
        shard=shard,
        temperature=size.temperature,
        entropy=size.entropy,
    )
    if not size.nucleus_ids:
        return base
    # On the host, where a recorded nucleus is too, and spread evenly over the slices of the vocabulary.
    ids = torch.arange(size.nucleus_ids) * size.vocab // size.nucleus_ids
    row_of = torch.arange(rows).repeat_interleave(size.nucleus_ids)
    recorded = torch.ones(rows, dtype=torch.bool)
    return TopPScorer(base, TopPMask(ids=ids.repeat(rows), row_of=row_of, recorded=recorded))


def _full(size: HeadSize, hidden: Tensor, weight: Tensor) -> _Run:
    targets = torch.zeros(size.rows, dtype=torch.int64, device="meta")
    shape = size.rows, size.top_k
    teacher = torch.empty(shape, device="meta"), torch.empty(shape, dtype=torch.int64, device="meta")
    # Fused, its gradient goes where memory stands already, and autograd makes none.
    used = weight.detach() if size.fused else weight

    def run(stop: Callable[[], None]) -> tuple[Tensor, ...]:
        gathered = hidden
        if hidden.shape[0] != size.rows:
            gathered = torch.cat([hidden] * size.tp)  # the sequence-parallel gather
        if size.top_k:
            return (full_topk_head(gathered, used, *teacher, temperature=size.temperature),)
        keep = None
        if size.nucleus_ids:
            keep = torch.empty(size.rows, used.shape[0], dtype=torch.bool, device="meta")
        return full_head(
            gathered,
            used,
            targets,
            temperature=size.temperature,
            entropy_gradient=size.entropy == "loss",
            with_entropy=size.entropy != "none",
            keep=keep,
        )

    return run


class _Watched:
    """An exchange before and after whose gathering a moment ends; and before its reduction, so that a step has as many
    moments backward as forward."""

    def __init__(self, exchange: RowExchange, stop: Callable[[], None]) -> None:
        self._exchange, self._stop = exchange, stop

    def gather(self, rows: Tensor) -> Tensor:
        self._stop()
        gathered = self._exchange.gather(rows)
        self._stop()
        return gathered

    def room(self, rows: Tensor) -> Tensor:
        return self._exchange.room(rows)

    def start_reduce(self, room: Tensor) -> Wait:
        self._stop()
        return self._exchange.start_reduce(room)


class _IntoMainGrad:
    """A weight gradient that goes where memory stands already."""

    lends, sums_in_place = False, True

    def begin(self, weight: Tensor, plan: ChunkPlan, memory: Tensor | None = None) -> WeightSum:
        return self

    def add(self, d_logits: Tensor, hidden: Tensor, columns: slice) -> None: ...

    def finish(self) -> None: ...


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
