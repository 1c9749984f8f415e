"""What the bench found, as tables or as JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from compact_logits.cli.bench_run import Outcome
from compact_logits.cli.bench_timing import Measured
from compact_logits.cli.tables import print_table

__all__ = ["as_json", "environment", "print_outcome"]

# Of the table: below it, numbers would be broken over lines.
_WIDTH = 108
_PACKAGES = ("torch", "triton", "megatron-core", "trl", "cut-cross-entropy")


def environment(device: torch.device) -> dict[str, str]:
    """On what, with what and when."""
    root = Path(__file__).parents[2]
    commit = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    known = {
        "hardware": _hardware(device),
        "python": platform.python_version(),
        "commit": commit or "unknown",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    for name in _PACKAGES:
        try:
            known[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            known[name] = "absent"
    return known


def as_json(outcomes: list[Outcome], rounds: int, known: dict[str, str]) -> dict[str, Any]:
    """All of it. Where a way failed, it has its failure and no numbers."""
    return {**known, "rounds": rounds, "cases": [_case_as_json(outcome) for outcome in outcomes]}


def print_outcome(outcome: Outcome) -> None:
    """One table of a case, and a line for each peer that is not in it; needs rich."""
    case, full, (three, four) = outcome.case, outcome.full_path, outcome.floors
    title = (
        f"{case.kept:,} of {case.tokens:,} rows ({case.density:.0%}), vocabulary {case.vocab:,}, "
        f"hidden {case.hidden:,}, {_dtype(outcome)}, entropy {case.entropy}; full path: {full.name}"
    )
    columns = ("way", "fwd_ms", "bwd_ms", "time_ms", "peak_mib", "x full", "/ floor 3", "/ floor 4")
    rows = []
    for way in [*outcome.ways, *outcome.floors]:
        if way.failure:
            continue
        name = f"{way.name}, full path" if way.view == "full path" else way.name
        times = [f"{value:.1f}" for value in (way.forward_ms, way.backward_ms, way.total_ms)]
        peak = "" if way.peak_mib is None else f"{way.peak_mib:.0f}"
        against = [full.total_ms / way.total_ms if not full.failure else None]
        against += [way.total_ms / floor.total_ms for floor in (three, four)]
        rows.append((name, *times, peak, *["" if value is None else f"{value:.2f}" for value in against]))
    print_table(title, columns, rows, numbers=True, least_width=_WIDTH)
    for way in outcome.ways:
        if way.failure:
            print(f"no numbers: {way.name} ({way.view}): {way.failure}")
    for name, reason in outcome.left_out.items():
        print(f"left out: {name}: {reason}")


def _case_as_json(outcome: Outcome) -> dict[str, Any]:
    case = outcome.case
    return {
        "tokens": case.tokens,
        "kept": case.kept,
        "density": case.density,
        "hidden": case.hidden,
        "vocabulary": case.vocab,
        "dtype": _dtype(outcome),
        "entropy": case.entropy,
        "full_path": outcome.full_path.name,
        "ways": [_way_as_json(way) for way in [*outcome.ways, *outcome.floors]],
        "left_out": outcome.left_out,
    }


def _way_as_json(way: Measured) -> dict[str, Any]:
    named = {"name": way.name, "view": way.view}
    if way.failure:
        return {**named, "failure": way.failure}
    return {
        **named,
        "errors": way.errors,
        "forward_ms": way.forward_ms,
        "backward_ms": way.backward_ms,
        "time_ms": way.total_ms,
        "times_ms": [f + b for f, b in zip(way.forward_times, way.backward_times, strict=True)],
        "forward_peak_mib": way.forward_peak_mib,
        "backward_peak_mib": way.backward_peak_mib,
        "peak_mib": way.peak_mib,
    }


def _dtype(outcome: Outcome) -> str:
    return str(outcome.case.dtype).removeprefix("torch.")


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.machine()
    return f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
