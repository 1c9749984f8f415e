"""The head's memory against sequence length and density, as a picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from compact_logits.cli.pictures import COMPACT, FULL, RULE, save
from compact_logits.cli.planning import PAD_MULTIPLE, Plan, padded, sweep
from compact_logits.cli.presets import Preset
from compact_logits.memory import HeadSize

__all__ = ["plot"]

_GIB = 2**30
_LENGTHS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
_DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)


def plot(plan: Plan, cp: int, preset: Preset, path: Path) -> None:
    """Draw both paths around the plan's size into the PNG at `path`; needs matplotlib.

    Raises `ConfigError` where it cannot be written.
    """
    from matplotlib.figure import Figure

    head = plan.compact.size
    density = head.kept / head.rows
    lengths = sorted({padded(round(head.rows * each), head.tp * PAD_MULTIPLE) for each in _LENGTHS})
    by_length = sweep([head.of_rows(rows) for rows in lengths])
    densities = sorted({*_DENSITIES, density} - {0.0})
    by_density = sweep([_of_density(head, each) for each in densities])

    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    parallel = f"TP {head.tp}{' with SP' if head.tp > 1 and head.sequence_parallel else ''}, CP {cp}"
    figure.suptitle(f"Peak memory of the LM head on one rank: {preset.name}, vocabulary {head.vocab:,}, {parallel}")
    panels = (
        (
            left,
            [rows * cp for rows in lengths],
            by_length,
            f"tokens of a micro-batch, {density:.0%} kept",
            head.rows * cp,
        ),
        (right, densities, by_density, f"share of rows kept, {head.rows * cp:,} tokens", density or min(densities)),
    )
    for axes, x, peaks, label, here in panels:
        for place, (name, color) in enumerate((("full path", FULL), ("compact path", COMPACT))):
            axes.plot(x, [peak[place] / _GIB for peak in peaks], "o-", color=color, label=name, markersize=4)
        axes.axvline(here, color=RULE, linewidth=0.8, alpha=0.5, label="this plan")
        if plan.free_bytes is not None:
            axes.axhline(plan.free_bytes / _GIB, color=RULE, linestyle="--", label="free on the card")
        axes.set_xlabel(label)
        axes.set_xscale("log", base=2 if axes is left else 10)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} GiB" if value >= 1 else f"{value * 1024:g} MiB")
        axes.grid(True, alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
    right.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    left.legend(frameon=False)
    save(figure, path)


def _of_density(head: HeadSize, density: float) -> HeadSize:
    kept = max(round(head.rows * density), 1)
    if head.kept == 0:
        return replace(head, kept=kept)
    return head.keeping(kept, head.rows)
