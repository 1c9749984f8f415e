"""Peak bytes of a head of any size, without allocating it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from compact_logits.chunks import plan_chunks
from compact_logits.errors import InputError
from compact_logits.exchange import Local, RowExchange, SequenceSharded
from compact_logits.memory.heads import full_head
from compact_logits.memory.tracker import StorageBytes
from compact_logits.projection import score_hidden
from compact_logits.rows import select
from compact_logits.scorers.log_prob import Entropy, LogProbScorer
from compact_logits.vocab_parallel import VocabShard

__all__ = ["HeadBytes", "HeadSize", "largest_fitting", "simulate"]

Path = Literal["full", "compact"]


@dataclass(frozen=True)
class HeadSize:
    """The head of one rank: `rows` of one micro-batch on this context-parallel rank, of which `kept` count."""

    rows: int
    kept: int
    vocab: int
    hidden: int
    tp: int = 1
    sequence_parallel: bool = True  # of no effect with `tp` 1
    dtype: torch.dtype = torch.bfloat16
    entropy: Entropy = "loss"
    temperature: float = 1.0
    frozen: bool = False
    fused: bool = False  # the weight's gradient is added to an existing fp32 `main_grad`
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        if min(self.rows, self.vocab, self.hidden, self.tp) < 1 or not 0 <= self.kept <= self.rows:
            raise InputError(f"needed positive sizes and 0 <= kept <= rows, got {self}")
        if self.vocab % self.tp or self.rows % self.tp:
            raise InputError(
                f"tensor parallelism over {self.tp} ranks needs vocabulary ({self.vocab}) and rows ({self.rows}) that "
                f"it divides; pad them as Megatron does"
            )


@dataclass(frozen=True)
class HeadBytes:
    """What stands at once beyond hidden states, weight and their gradient buffers of other layers, in bytes.

    `forward`: most during forward. `saved`: between forward and backward. `backward`: most during backward, what is
    saved and the new gradients of hidden states and weight included.
    """

    forward: int
    saved: int
    backward: int

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward)

    def extended(self, shorter: HeadBytes, times: float) -> HeadBytes:
        """As much again, `times` over, as this has beyond `shorter`."""

        def extend(mine: int, less: int) -> int:
            return mine + round((mine - less) * times)

        return HeadBytes(
            forward=extend(self.forward, shorter.forward),
            saved=extend(self.saved, shorter.saved),
            backward=extend(self.backward, shorter.backward),
        )


def simulate(size: HeadSize, path: Path) -> HeadBytes:
    """Run forward and backward of one path on meta tensors and count the storages. Nothing of that size is allocated.

    The compact path is the code that trains; many chunks are run as two and as three, since each further chunk adds
    the same bytes. Under tensor parallelism its collectives run on a group of `size.tp` ranks that are not there, which
    needs a process without a process group: `InputError` otherwise.
    """
    if path == "full":
        return _run(size, path)
    chunk = plan_chunks(size.kept, size.vocab // size.tp, size.dtype, torch.device("meta"), size.chunk_bytes).chunk
    if size.kept <= 3 * chunk:
        return _run(size, path)
    two, three = (_run(replace(size, kept=count * chunk), path) for count in (2, 3))
    return three.extended(two, (size.kept - 3 * chunk) / chunk)


def _run(size: HeadSize, path: Path) -> HeadBytes:
    with _group(size.tp if path == "compact" else 1) as group, StorageBytes() as bytes_:
        local_rows = size.rows // size.tp if size.sequence_parallel else size.rows
        hidden = torch.empty(local_rows, size.hidden, dtype=size.dtype, device="meta", requires_grad=True)
        weight = torch.empty(size.vocab // size.tp, size.hidden, dtype=size.dtype, device="meta")
        weight.requires_grad_(not size.frozen)
        run = _compact(size, hidden, weight, group) if path == "compact" else _full(size, hidden, weight)
        inputs = bytes_.live
        bytes_.restart_peak()
        outputs = run()
        forward, saved = bytes_.peak - inputs, bytes_.live - inputs
        bytes_.restart_peak()
        torch.autograd.backward([output.sum() for output in outputs if output.requires_grad])
        return HeadBytes(forward=forward, saved=saved, backward=bytes_.peak - inputs)


def _compact(size: HeadSize, hidden: Tensor, weight: Tensor, group: dist.ProcessGroup | None) -> Callable[[], tuple]:
    # Kept rows spread evenly over the shards, as padding to the largest shard is then least.
    share = -(-size.kept // size.tp)
    counts = tuple(min(share, max(size.kept - rank * share, 0)) for rank in range(size.tp))
    sharded = size.sequence_parallel and group is not None
    exchange: RowExchange | None = SequenceSharded(group, counts) if sharded and group is not None else None
    if group is None:
        exchange = Local()
    scorer = LogProbScorer(
        targets=torch.zeros(size.kept, dtype=torch.int64, device="meta"),
        shard=VocabShard(0, weight.shape[0], group),
        temperature=size.temperature,
        entropy=size.entropy,
    )

    def run() -> tuple[Tensor, ...]:
        indices = torch.zeros(counts[0] if sharded else size.kept, dtype=torch.int64, device="meta")
        rows = select(hidden, indices)
        sink = _IntoMainGrad() if size.fused else None
        return score_hidden(
            rows, weight, None, scorer, exchange=exchange, group=group, weight_grad=sink, chunk_bytes=size.chunk_bytes
        )

    return run


def _full(size: HeadSize, hidden: Tensor, weight: Tensor) -> Callable[[], tuple]:
    targets = torch.zeros(size.rows, dtype=torch.int64, device="meta")

    def run() -> tuple[Tensor, ...]:
        gathered = hidden
        if hidden.shape[0] != size.rows:
            gathered = torch.cat([hidden] * size.tp)  # the sequence-parallel gather
        gradient = size.entropy == "loss"
        return full_head(gathered, weight, targets, temperature=size.temperature, entropy_gradient=gradient)

    return run


class _IntoMainGrad:
    """A weight gradient that goes where memory stands already."""

    def begin(self, weight: Tensor, chunks: int) -> None: ...

    def add(self, d_logits: Tensor, hidden: Tensor) -> None: ...

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
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def largest_fitting(size: HeadSize, path: Path, budget: int) -> int:
    """The most rows of a micro-batch whose head stays within `budget` bytes, at `size`'s density; 0 if none does.

    Found by doubling and halving over simulations, in steps of `size.tp` rows, up to 2**24 rows.
    """

    def fits(rows: int) -> bool:
        kept = round(size.kept / size.rows * rows)
        return simulate(replace(size, rows=rows, kept=kept), path).peak <= budget

    low, high = 0, size.tp
    while high <= 2**24 and fits(high):
        low, high = high, high * 2
    while high - low > size.tp:
        middle = (low + high) // 2 // size.tp * size.tp
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
