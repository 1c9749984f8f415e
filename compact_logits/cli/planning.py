"""How much memory the head of a setup takes on both paths, and what fits a card."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from compact_logits.cli.rollouts import Rollout
from compact_logits.cli.slime_batches import RankRows, first_fit, rows_of_ranks
from compact_logits.engine.balance import pays
from compact_logits.memory import HeadBytes, HeadSize, largest_fitting, simulate
from compact_logits.memory.fitting import MOST_ROWS

__all__ = [
    "PAD_MULTIPLE",
    "PathPlan",
    "Plan",
    "Traffic",
    "head_of_tokens",
    "make_plan",
    "padded",
    "plan_of_rollouts",
    "sweep",
]

PAD_MULTIPLE = 128  # slime's and Megatron's padding of rows, times the tensor-parallel size


@dataclass(frozen=True)
class PathPlan:
    """One path: the rank and micro-batch with the highest peak, its bytes, and the most rows of a rank that fit."""

    size: HeadSize
    bytes: HeadBytes
    largest_rows: int | None = None  # None where no card was named

    @property
    def largest_is_a_floor(self) -> bool:
        """Whether more rows may fit than were looked at."""
        return self.largest_rows is not None and self.largest_rows >= MOST_ROWS - self.size.tp


@dataclass(frozen=True)
class Traffic:
    """What real masks come to: micro-batches, and the rows that each context-parallel rank has and keeps."""

    rollouts: int
    tokens: int
    kept: int
    micro_batches: int
    ranks: list[RankRows]

    @property
    def density(self) -> float:
        return self.kept / self.tokens

    def of_cp_rank(self, cp_rank: int) -> list[RankRows]:
        return [each for each in self.ranks if each.cp_rank == cp_rank]

    def critical_rows(self, *, balanced: bool) -> int:
        """Rows that the busiest context-parallel rank projects of each micro-batch, summed over them: what the others
        wait for. `balanced`: with `COMPACT_LOGITS_CP_BALANCE`, where it pays."""
        total = 0
        for number in range(self.micro_batches):
            kept = [each.kept for each in self.ranks if each.micro_batch == number]
            total += -(-sum(kept) // len(kept)) if balanced and pays(kept) else max(kept)
        return total


@dataclass(frozen=True)
class Plan:
    """Both paths. `free_bytes` is what a card leaves for the head; `traffic` where rollouts were given."""

    full: PathPlan
    compact: PathPlan
    free_bytes: int | None = None
    traffic: Traffic | None = None

    def fits(self, path: PathPlan) -> bool | None:
        return None if self.free_bytes is None else path.bytes.peak <= self.free_bytes


def padded(count: int, multiple: int) -> int:
    """The next multiple."""
    return max(-(-count // multiple), 1) * multiple


def head_of_tokens(head: HeadSize, tokens: int, kept: int, cp: int) -> HeadSize:
    """The head of one rank for a micro-batch of `tokens` over `cp` ranks, of which `kept` count, spread evenly."""
    rows = padded(-(-tokens // cp), head.tp * PAD_MULTIPLE)
    return replace(head, rows=rows, kept=min(-(-kept // cp), rows), most_on_shard=None)


def make_plan(head: HeadSize, free_bytes: int | None) -> Plan:
    """Simulate both paths of one size."""
    return _plan([head], free_bytes)


def plan_of_rollouts(
    head: HeadSize,
    rollouts: list[Rollout],
    *,
    token_budget: int,
    cp: int,
    allgather_cp: bool,
    free_bytes: int | None,
) -> Plan:
    """Pack `rollouts` as slime would and plan for the rank and micro-batch that take most, on each path.

    `head`: everything but the rows. `token_budget`: of a micro-batch over all context-parallel ranks.
    """
    batches = first_fit(rollouts, token_budget)
    ranks = rows_of_ranks(batches, tp=head.tp, cp=cp, allgather_cp=allgather_cp, pad_multiple=PAD_MULTIPLE)
    traffic = Traffic(
        rollouts=len(rollouts),
        tokens=sum(len(rollout.tokens) for rollout in rollouts),
        kept=sum(sum(rollout.loss_mask) for rollout in rollouts),
        micro_batches=len(batches),
        ranks=ranks,
    )
    return replace(_plan([_head_of_rank(head, rank) for rank in ranks], free_bytes), traffic=traffic)


def sweep(heads: Sequence[HeadSize]) -> list[tuple[int, int]]:
    """Peak bytes of the full and of the compact path, for each size."""
    with _quiet():
        return [(simulate(head, "full").peak, simulate(head, "compact").peak) for head in heads]


def _plan(heads: list[HeadSize], free_bytes: int | None) -> Plan:
    with _quiet():
        full = max(heads, key=lambda head: head.rows)
        compact, most = max(
            ((head, simulate(head, "compact")) for head in _not_outdone(heads)), key=lambda pair: pair[1].peak
        )
        plans = PathPlan(full, simulate(full, "full")), PathPlan(compact, most)
        if free_bytes is not None:
            plans = (
                replace(plans[0], largest_rows=largest_fitting(full, "full", free_bytes)),
                replace(plans[1], largest_rows=largest_fitting(compact, "compact", free_bytes)),
            )
    return Plan(*plans, free_bytes=free_bytes)


def _not_outdone(heads: list[HeadSize]) -> list[HeadSize]:
    """The sizes of which no other has as many rows, keeps as many, and has as full a shard: the rest take less."""
    best: list[HeadSize] = []
    for head in sorted(set(heads), key=_load, reverse=True):
        if not any(all(a >= b for a, b in zip(_load(other), _load(head), strict=True)) for other in best):
            best.append(head)
    return best


def _load(head: HeadSize) -> tuple[int, int, int]:
    return head.kept, head.rows, head.shard_counts[0]


def _head_of_rank(head: HeadSize, rank: RankRows) -> HeadSize:
    # Without sequence parallelism every rank has all rows, and no shard matters.
    most = max(rank.kept_of_shards) if head.sequence_parallel and head.tp > 1 else None
    return replace(head, rows=rank.rows, kept=rank.kept, most_on_shard=most)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns of collectives that are to get other names, which does not matter to the user of a plan."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
