"""Time and memory of the bench against the share of rows kept, with the floor drawn."""

from __future__ import annotations

from pathlib import Path

from compact_logits.cli.bench_run import Outcome
from compact_logits.cli.bench_timing import Measured
from compact_logits.cli.pictures import COMPACT, FULL, RULE, save

__all__ = ["plot"]

_COLORS = {"full path": FULL, "ours": COMPACT, "as shipped": "#8c8c8c", "rows selected": "#55a868"}
_STYLES = {"full path": "o-", "ours": "o-", "as shipped": ":", "rows selected": "--"}


def plot(outcomes: list[Outcome], path: Path) -> None:
    """Draw the outcomes, which differ in their density, into the PNG at `path`; needs matplotlib.

    Raises `ConfigError` where it cannot be written.
    """
    from matplotlib.figure import Figure

    first = outcomes[0].case
    figure = Figure(figsize=(11, 5), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    dtype = str(first.dtype).removeprefix("torch.")
    figure.suptitle(
        f"Forward and backward of the LM head: {first.tokens:,} rows, vocabulary {first.vocab:,}, hidden "
        f"{first.hidden:,}, {dtype}, entropy {first.entropy}"
    )
    lines = dict.fromkeys((way.view, way.name) for outcome in outcomes for way in outcome.ways)
    for axes, of in ((left, _seconds), (right, _mib)):
        for view, name in lines:
            points = [(outcome.case.density, of(outcome.find(name, view))) for outcome in outcomes]
            there = [(x, y) for x, y in points if y is not None]
            quiet = view in ("as shipped", "rows selected")
            axes.plot(
                [x for x, _ in there],
                [y for _, y in there],
                _STYLES[view],
                color=_COLORS[view],
                linewidth=0.9 if quiet else 2,
                alpha=0.7 if quiet else 1,
                markersize=4,
                label=f"{name} ({view})",
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks([outcome.case.density for outcome in outcomes], minor=False)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.minorticks_off()
        axes.set_xlabel("share of rows kept")
        axes.grid(True, alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    for place, style in ((0, "-"), (1, "-.")):
        floors = [outcome.floors[place] for outcome in outcomes]
        densities, times = [outcome.case.density for outcome in outcomes], [floor.total_ms for floor in floors]
        left.plot(densities, times, style, color=RULE, linewidth=1.5, label=f"floor: {floors[0].name}")
    left.set_ylabel("time_ms")
    right.set_ylabel("peak_mib, gradients included")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=7)
    save(figure, path)


def _seconds(way: Measured | None) -> float | None:
    return None if way is None or way.failure else way.total_ms


def _mib(way: Measured | None) -> float | None:
    return None if way is None or way.failure else way.peak_mib
