"""Whether two runs of a recipe came to the same: values of counted rows, metrics, and every parameter's gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tests.upstream.slime.harness import Result

__all__ = ["EQUAL", "Tolerance", "differences", "took_compact_path", "verdict"]

EQUAL = "compact, equal"

# What the model's head says of a row, by slime's names. A compact pass has no value at a row that does not count.
_OF_THE_HEAD = ("log_probs", "ref_log_probs", "teacher_log_probs", "probe_log_probs", "probe_entropy")


@dataclass(frozen=True)
class Tolerance:
    value: float  # absolute
    metric: float  # relative, and absolute below 1
    gradient: float  # of the L2 norm of the difference, relative to the full path's

    @classmethod
    def of(cls, dtype: torch.dtype) -> Tolerance:
        return {torch.float32: cls(1e-5, 3e-5, 1e-4), torch.bfloat16: cls(1e-2, 1e-2, 2e-2)}[dtype]


def differences(full: Result, ours: Result, tolerance: Tolerance, but: tuple[str, ...] = ()) -> list[str]:
    """Everything in which `ours` is not what the full path found, in words; empty if they agree.

    With a tolerance, values are compared at the rows that count, and metrics unless named in `but`; without, all.
    """
    return [
        *_values(full, ours, tolerance.value),
        *_metrics(full, ours, tolerance.metric, but),
        *_gradients(full, ours, tolerance.gradient),
    ]


def took_compact_path(result: Result) -> bool:
    """Whether every pass left the rows that do not count at exactly 0, which no full path does, and there are some."""
    passes = [values for name, values in result.values.items() if name in _OF_THE_HEAD]
    off = [value[mask == 0] for values in passes for value, mask in zip(values, result.masks, strict=True)]
    return sum(value.numel() for value in off) > 0 and all(bool((value == 0).all()) for value in off)


def verdict(full: Iterable[Result], ours: Iterable[Result], tolerance: Tolerance, but: tuple[str, ...] = ()) -> str:
    """One line for all ranks: equal over the compact path, the full path to the bit and why, or where they differ."""
    pairs = list(zip(full, ours, strict=True))
    reasons = {warning for _, each in pairs for warning in each.warnings if warning.startswith("full path")}
    allowed = Tolerance(0.0, 0.0, 0.0) if reasons else tolerance
    found = [f"rank {rank}: {text}" for rank, pair in enumerate(pairs) for text in differences(*pair, allowed, but)]
    if found:
        return f"DIFFERS in {len(found)}: {found[0]}"
    last_stages = [each for _, each in pairs if each.values]
    if reasons:
        return "; ".join(sorted(reasons))
    blind = [each for each in last_stages if any(bool((mask == 0).any()) for mask in each.masks)]
    if not blind or not all(took_compact_path(each) for each in blind):
        return "DIFFERS: nothing was compacted, and no reason given"
    return EQUAL


def _values(full: Result, ours: Result, allowed: float) -> Iterable[str]:
    if full.values.keys() != ours.values.keys():
        yield f"values of {sorted(full.values)} became those of {sorted(ours.values)}"
        return
    for name, values in full.values.items():
        for sample, (theirs, mine, mask) in enumerate(zip(values, ours.values[name], full.masks, strict=True)):
            if theirs.shape != mine.shape or theirs.dtype != mine.dtype:
                kinds = [f"{each.dtype} {tuple(each.shape)}" for each in (theirs, mine)]
                yield f"{name} of sample {sample}: {' became '.join(kinds)}"
                continue
            counted = mask != 0 if allowed else torch.ones_like(mask, dtype=torch.bool)
            gap = (theirs - mine).abs()[counted]
            if not bool((gap <= allowed).all()):
                yield f"{name} of sample {sample} is off by {gap.max().item():.3g}"


def _metrics(full: Result, ours: Result, allowed: float, but: tuple[str, ...]) -> Iterable[str]:
    ours_alone = {name for name in ours.metrics if name.partition(" ")[2].startswith("train/compact_logits/")}
    apart = full.metrics.keys() ^ (ours.metrics.keys() - ours_alone)
    if apart:
        yield f"metrics {sorted(apart)} are in one run alone"
    for name in full.metrics.keys() & ours.metrics.keys():
        theirs, mine = full.metrics[name], ours.metrics[name]
        same = theirs == mine or (math.isnan(theirs) and math.isnan(mine))
        if allowed and name.partition(" ")[2] in but:
            continue
        if not same and not abs(theirs - mine) <= allowed * max(1.0, abs(theirs)):
            yield f"metric {name}: {theirs:.7g} became {mine:.7g}"


def _gradients(full: Result, ours: Result, allowed: float) -> Iterable[str]:
    if len(full.gradients) != len(ours.gradients):
        yield f"{len(full.gradients)} steps became {len(ours.gradients)}"
        return
    for step, (theirs, mine) in enumerate(zip(full.gradients, ours.gradients, strict=True)):
        if theirs.keys() != mine.keys():
            yield f"step {step}: gradients of {sorted(theirs.keys() ^ mine.keys())} are in one run alone"
        for name in theirs.keys() & mine.keys():
            norm = theirs[name].double().norm().item()
            gap = (theirs[name].double() - mine[name].double()).norm().item()
            if not gap <= allowed * norm:
                share = f"{gap / norm:.3g} of its norm" if norm else f"{gap:.3g}, from zero"
                yield f"step {step}: gradient of {name} is off by {share}"
