"""A memory plan, as tables or as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from compact_logits.cli.planning import PathPlan, Plan, Traffic
from compact_logits.cli.presets import Preset
from compact_logits.cli.tables import print_table
from compact_logits.engine.slices import VocabSlices, default_budget, vocab_slices
from compact_logits.memory import HeadSize

__all__ = ["PlanReport", "gib"]

_GIB = 2**30
_GPU = torch.device("cuda")


def gib(count: int) -> str:
    """A number of bytes for reading."""
    return f"{count / _GIB:,.2f} GiB"


@dataclass(frozen=True)
class PlanReport:
    """The plan, the model it is for, and the card: its bytes and those reserved."""

    plan: Plan
    preset: Preset
    cp: int
    memory: tuple[int, int] | None

    def as_json(self) -> dict[str, Any]:
        """For a JSON file. All sizes in bytes; rows are those of one rank."""
        plan, head = self.plan, self.plan.compact.size
        return {
            "model": {**asdict(self.preset), "padded_vocab": head.vocab},
            "setup": {
                "tensor_parallel": head.tp,
                "sequence_parallel": head.sequence_parallel and head.tp > 1,
                "context_parallel": self.cp,
                "dtype": str(head.dtype).removeprefix("torch."),
                "entropy": None if head.top_k else head.entropy,
                "temperature": head.temperature,
                "nucleus_ids": head.nucleus_ids,
                "top_k": head.top_k,
                "frozen": head.frozen,
                "fused": head.fused,
                "chunk_bytes": _budget(head),
            },
            "full_path": self._path_as_json(plan.full),
            "compact_path": self._path_as_json(plan.compact),
            "card": None
            if self.memory is None
            else {"memory_bytes": self.memory[0], "reserved_bytes": self.memory[1], "free_bytes": plan.free_bytes},
            "logits": {
                "bytes": _logits_bytes(head),
                "slices": len(_slices(head)),
                "saved_slices": _slices(head).saved,
            },
            "weight": {"bytes": _weight_bytes(head), "tied": self.preset.tied},
            "rollouts": None if plan.traffic is None else self._traffic_as_json(plan.traffic),
        }

    def print_tables(self) -> None:
        """The same for reading; needs rich."""
        plan, head = self.plan, self.plan.compact.size
        if plan.traffic is not None:
            self._print_traffic(plan.traffic)
        full, compact = plan.full, plan.compact
        rows: list[tuple[str, ...]] = [
            ("rows of a rank", f"{full.size.rows:,}", f"{compact.size.rows:,}", ""),
            (
                "rows projected",
                f"{full.size.rows:,}",
                f"{compact.size.kept:,}",
                _times(full.size.rows, compact.size.kept),
            ),
            *[
                (label, gib(before), gib(after), _times(before, after))
                for label, before, after in (
                    ("forward", full.bytes.forward, compact.bytes.forward),
                    ("kept for backward", full.bytes.saved, compact.bytes.saved),
                    ("backward", full.bytes.backward, compact.bytes.backward),
                    ("peak of the head", full.bytes.peak, compact.bytes.peak),
                )
            ],
        ]
        if plan.free_bytes is not None:
            fits = ["yes" if plan.fits(path) else "no" for path in (full, compact)]
            rows.append((f"fits {gib(plan.free_bytes)}", *fits, ""))
            most = [self._largest(path) for path in (full, compact)]
            rows.append(
                ("largest micro-batch, tokens", *map(_at_least, most, (full, compact)), _times(most[1], most[0]))
            )
        parallel = f"TP {head.tp}{' with SP' if head.tp > 1 and head.sequence_parallel else ''}, CP {self.cp}"
        vocab = f"{self.preset.vocab:,}" + (f" (padded: {head.vocab:,})" if head.vocab != self.preset.vocab else "")
        title = f"{self.preset.name}: vocabulary {vocab}, hidden {head.hidden:,}; {parallel}"
        print_table(title, ("", "full path", "compact path", "times"), rows, numbers=True)
        print(f"sizes from {self.preset.source}")
        owner = "the embedding's, tied" if self.preset.tied else "the head's own"
        print(f"not in these numbers: the weight, {gib(_weight_bytes(head))} on a rank ({owner}), and all other layers")
        self._print_logits(head)
        if self.memory is not None:
            reserved = gib(self.memory[1]) if self.memory[1] else "nothing (--reserved says what else is on the card)"
            print(f"of {gib(self.memory[0])} is reserved: {reserved}")

    def _print_logits(self, head: HeadSize) -> None:
        slices, source = _slices(head), "--chunk-bytes" if head.chunk_bytes else "the default on a GPU"
        print(
            f"logits of the compact path: {gib(_logits_bytes(head))} at a time; slices of the vocabulary: "
            f"{len(slices):,}, saved for backward: {slices.saved:,}"
        )
        print(f"their budget: {gib(_budget(head))} ({source}; COMPACT_LOGITS_CHUNK_BYTES sets it for the frameworks)")
        print("saved logits are in memory until backward: under pipeline parallelism of every micro-batch in flight")

    def _print_traffic(self, traffic: Traffic) -> None:
        rows = []
        for cp_rank in range(self.cp):
            of_rank = traffic.of_cp_rank(cp_rank)
            kept = [each.kept for each in of_rank]
            rows.append(
                (
                    f"CP rank {cp_rank}",
                    f"{max(each.rows for each in of_rank):,}",
                    f"{sum(kept) / len(kept):,.0f}",
                    f"{max(kept):,}",
                    f"{max(max(each.kept_of_shards) for each in of_rank):,}",
                )
            )
        title = (
            f"{traffic.rollouts:,} rollouts of {traffic.tokens:,} tokens, {traffic.density:.1%} kept, in "
            f"{traffic.micro_batches:,} micro-batches"
        )
        columns = ("", "rows, most", "kept rows, mean", "most", "most on one shard")
        print_table(title, columns, rows, numbers=True)
        if self.cp > 1:
            before, after = (traffic.critical_rows(balanced=each) for each in (False, True))
            print(
                f"rows that the busiest CP rank projects, over all micro-batches: {before:,}; with "
                f"COMPACT_LOGITS_CP_BALANCE=1: {after:,}"
            )

    def _path_as_json(self, path: PathPlan) -> dict[str, Any]:
        return {
            "rows": path.size.rows,
            "kept_rows": path.size.kept,
            "forward_bytes": path.bytes.forward,
            "saved_bytes": path.bytes.saved,
            "backward_bytes": path.bytes.backward,
            "peak_bytes": path.bytes.peak,
            "fits": self.plan.fits(path),
            "largest_micro_batch_tokens": None if path.largest_rows is None else self._largest(path),
            "largest_is_a_floor": path.largest_is_a_floor,
        }

    def _traffic_as_json(self, traffic: Traffic) -> dict[str, Any]:
        return {
            "rollouts": traffic.rollouts,
            "tokens": traffic.tokens,
            "kept": traffic.kept,
            "density": traffic.density,
            "micro_batches": traffic.micro_batches,
            "critical_rows": traffic.critical_rows(balanced=False),
            "critical_rows_balanced": traffic.critical_rows(balanced=True),
            "ranks": [{**asdict(rank), "kept": rank.kept} for rank in traffic.ranks],
        }

    def _largest(self, path: PathPlan) -> int:
        return (path.largest_rows or 0) * self.cp


def _weight_bytes(head: HeadSize) -> int:
    return head.vocab // head.tp * head.hidden * head.dtype.itemsize


def _budget(head: HeadSize) -> int:
    return head.chunk_bytes or default_budget(_GPU)


def _slices(head: HeadSize) -> VocabSlices:
    return vocab_slices(head.kept, head.vocab // head.tp, head.hidden, head.dtype, _GPU, head.chunk_bytes)


def _logits_bytes(head: HeadSize) -> int:
    return _slices(head).peak_logits(keep=True) * head.dtype.itemsize


def _times(more: int, less: int) -> str:
    return f"{more / less:,.1f}x" if less and more else ""


def _at_least(tokens: int, path: PathPlan) -> str:
    return f"{tokens:,}{' or more' if path.largest_is_a_floor else ''}"
