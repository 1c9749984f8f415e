"""What the demo found, as one table or as JSON."""

from __future__ import annotations

import datetime
import math
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compact_logits.cli.comparison import BOUNDS, Comparison, worst
from compact_logits.cli.demo_rank import Job, RankOutcome
from compact_logits.cli.training import Training

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Report"]

_MIB = 2**20


@dataclass(frozen=True)
class Report:
    """The outcome of all ranks: differences, sizes and times are those of the rank where they are largest."""

    job: Job
    ranks: list[RankOutcome]

    @property
    def comparison(self) -> Comparison:
        return worst([rank.comparison for rank in self.ranks])

    @property
    def passed(self) -> bool:
        return self.comparison.passed(BOUNDS[self.job.dtype])

    def verdict(self) -> str:
        """One sentence."""
        found, bounds = self.comparison, BOUNDS[self.job.dtype]
        said = "parity holds" if self.passed else "PARITY FAILED"
        return (
            f"{said}: loss differs by {found.loss:.1e} (bound {bounds.loss:.0e}), gradients by at most "
            f"{found.gradient:.1e} (bound {bounds.gradient:.0e}), in {found.parameter or 'none of them'}"
        )

    def as_json(self) -> dict[str, Any]:
        """For a JSON file. A number that is not finite, which JSON has no word for, is `None`."""
        found, bounds, first = self.comparison, BOUNDS[self.job.dtype], self.ranks[0]
        return {
            "parity": {
                "passed": self.passed,
                "loss_difference": _number(found.loss),
                "loss_bound": bounds.loss,
                "gradient_relative_difference": _number(found.gradient),
                "gradient_bound": bounds.gradient,
                "gradient_steps_compared": bounds.gradient_steps or self.job.settings.steps,
                "worst_gradient": found.parameter,
            },
            "rows": first.rows,
            "rows_kept": first.kept,
            "full_path": self._path_as_json([rank.full for rank in self.ranks]),
            "compact_path": self._path_as_json([rank.compact for rank in self.ranks]),
            "setup": {
                "device": "cpu",
                "machine": platform.machine(),
                "tensor_parallel": len(self.ranks),
                "sequence_parallel": len(self.ranks) > 1,
                "dtype": _name(self.job.dtype),
                "vocabulary": self.job.vocab,
                "hidden": self.job.hidden,
                "layers": self.job.layers,
                "steps": self.job.settings.steps,
                "micro_batches": len(self.job.batches),
                "temperature": self.job.settings.temperature,
            },
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "megatron": first.megatron},
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }

    def as_table(self) -> Table:
        """The same for reading; needs rich."""
        from rich.table import Table

        found, first, steps = self.comparison, self.ranks[0], self.job.settings.steps
        full, compact = (_largest([getattr(rank, path) for rank in self.ranks]) for path in ("full", "compact"))
        table = Table(
            title=f"{steps} steps, TP {len(self.ranks)}{' with SP' if len(self.ranks) > 1 else ''}, "
            f"{_name(self.job.dtype)}, vocabulary {self.job.vocab:,}, megatron-core {first.megatron}"
        )
        for column in ("", "full path", "compact path", "difference"):
            table.add_column(column, justify="left" if not column else "right")
        table.add_row("rows projected", f"{first.rows:,}", f"{first.kept:,}", f"{first.kept / first.rows:.1%} kept")
        table.add_row("loss, last step", f"{full.losses[-1]:.7f}", f"{compact.losses[-1]:.7f}", f"{found.loss:.1e}")
        table.add_row("gradients, worst of all", "", "", f"{found.gradient:.1e}")
        table.add_row(
            "largest logits held",
            _size(full),
            _size(compact),
            f"{full.largest_bytes / compact.largest_bytes:.1f}x smaller" if compact.largest_bytes else "",
        )
        table.add_row(
            "time",
            f"{full.seconds:.1f} s",
            f"{compact.seconds:.1f} s",
            f"{full.seconds / compact.seconds:.2f}x as fast",
        )
        return table

    def _path_as_json(self, trainings: list[Training]) -> dict[str, Any]:
        largest = _largest(trainings)
        return {
            "losses": [_number(loss) for loss in trainings[0].losses],
            "time_ms": largest.seconds * 1e3,
            "largest_logits_bytes": largest.largest_bytes,
            "largest_logits_shape": list(largest.largest_shape),
            "largest_logits_dtype": largest.largest_dtype,
        }


def _largest(trainings: list[Training]) -> Training:
    """The slowest rank's time and the largest tensor of any rank, in one."""
    largest = max(trainings, key=lambda training: training.largest_bytes)
    return Training(
        losses=trainings[0].losses,
        seconds=max(training.seconds for training in trainings),
        largest_bytes=largest.largest_bytes,
        largest_shape=largest.largest_shape,
        largest_dtype=largest.largest_dtype,
    )


def _size(training: Training) -> str:
    shape = " x ".join(f"{size:,}" for size in training.largest_shape if size != 1)
    return f"{shape}\n{training.largest_bytes / _MIB:.2f} MiB"


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
