"""Metrics of compact heads: counters on the host, updated at each micro-batch."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, fields

from compact_logits.megatron.request import Request

__all__ = ["HeadMetrics"]


@dataclass
class HeadMetrics:
    """Sums over the micro-batches that had a request, on this rank alone. No collective, no device synchronisation.

    `rows` counts the rows of the micro-batches, `projected_rows` those that the head projected: on the full path all;
    on the compact path the kept ones, or this rank's part of them if context-parallel ranks balance their rows.
    `bytes_not_allocated` is `4 * rows * vocab_local`, the fp32 logits that the full path passes to the loss, less the
    logits that the compact forward allocated, 0 on the full path; `most_bytes_not_allocated` is the
    largest value of one micro-batch.
    `full_path` counts micro-batches by reason, numbers written as `#`.
    """

    micro_batches: int = 0
    rows: int = 0
    projected_rows: int = 0
    bytes_not_allocated: int = 0
    most_bytes_not_allocated: int = 0
    full_path: Counter[str] = field(default_factory=Counter)

    def record(self, request: Request) -> None:
        """Count a micro-batch whose outcome is known."""
        outcome = request.outcome
        assert outcome is not None
        self.micro_batches += 1
        self.rows += request.selection.num_rows
        self.projected_rows += outcome.projected_rows if request.compact else request.selection.num_rows
        self.bytes_not_allocated += outcome.bytes_not_allocated
        self.most_bytes_not_allocated = max(self.most_bytes_not_allocated, outcome.bytes_not_allocated)
        if not request.compact:
            self.full_path[re.sub(r"\d+", "#", outcome.reason)] += 1

    def take(self) -> HeadMetrics:
        """Return what was counted since the last `take`, and reset the counters."""
        taken = HeadMetrics(**{each.name: getattr(self, each.name) for each in fields(self)})
        vars(self).update(vars(HeadMetrics()))
        return taken

    def metrics(self) -> dict[str, float]:
        """As numbers by name, for a metric logger. Each reason for the full path that occurred has a key."""
        by_reason = {f"compact_logits/full_path/{_key(reason)}": count for reason, count in self.full_path.items()}
        return {
            "compact_logits/micro_batches": self.micro_batches,
            "compact_logits/rows": self.rows,
            "compact_logits/projected_rows": self.projected_rows,
            "compact_logits/bytes_not_allocated": self.bytes_not_allocated,
            "compact_logits/most_bytes_not_allocated": self.most_bytes_not_allocated,
            "compact_logits/full_path_micro_batches": self.full_path.total(),
            **by_reason,
        }

    def __str__(self) -> str:
        share = f" ({self.projected_rows / self.rows:.1%})" if self.rows else ""
        text = (
            f"projected {self.projected_rows} of {self.rows} rows{share}, up to "
            f"{self.most_bytes_not_allocated / 2**30:.2f} GiB of logits not allocated, "
            f"{self.full_path.total()} of {self.micro_batches} micro-batches on the full path"
        )
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self.full_path.items())
        return f"{text}: {reasons}" if reasons else text


def _key(reason: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", reason.lower()).strip("_")
