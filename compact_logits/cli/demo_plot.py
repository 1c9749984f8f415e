"""The demo's outcome as a picture: the losses of both paths, and the largest logits that each held."""

from __future__ import annotations

from pathlib import Path

from compact_logits.cli.pictures import COMPACT, FULL, save
from compact_logits.cli.report import Report

__all__ = ["plot"]

_MIB = 2**20


def plot(report: Report, path: Path) -> None:
    """Draw into the PNG at `path`; needs matplotlib. Raises `ConfigError` where it cannot be written."""
    from matplotlib.figure import Figure

    found = report.as_json()
    both = (("full path", found["full_path"], FULL), ("compact path", found["compact_path"], COMPACT))
    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    kept, rows = found["rows_kept"], found["rows"]
    figure.suptitle(f"{kept:,} of {rows:,} rows projected ({kept / rows:.0%}); {report.verdict().split(',')[0]}")
    steps = range(1, len(found["full_path"]["losses"]) + 1)
    for (name, outcome, color), style in zip(both, ("o-", "x--"), strict=True):
        left.plot(steps, outcome["losses"], style, color=color, label=name)
    left.set_xlabel("optimiser step")
    left.set_ylabel("loss")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(frameon=False)
    sizes = [outcome["largest_logits_bytes"] / _MIB for _, outcome, _ in both]
    bars = right.bar([name for name, _, _ in both], sizes, color=[color for _, _, color in both], width=0.5)
    right.bar_label(bars, [f"{size:.2f} MiB" for size in sizes])
    right.set_ylabel("largest logits held, MiB")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
