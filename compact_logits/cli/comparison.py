"""Whether two trainings from the same start are the same, and by how much they differ."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from compact_logits.cli.training import Training
from compact_logits.errors import InputError

__all__ = ["BOUNDS", "Bounds", "Comparison", "compare", "worst"]


@dataclass(frozen=True)
class Bounds:
    """The largest differences that rounding explains: of the loss, absolute, and of a gradient, relative in L2.

    Gradients are compared in the first `gradient_steps` steps, in all for `None`. In bfloat16 that is the one that
    starts from the same weights: AdamW turns the rounding of a small gradient into a step of full size, of which some
    weights then take the next representable value and others do not.
    """

    loss: float
    gradient: float
    gradient_steps: int | None = None


BOUNDS = {
    torch.float32: Bounds(loss=1e-5, gradient=1e-4),
    torch.bfloat16: Bounds(loss=1e-2, gradient=2e-2, gradient_steps=1),
}


@dataclass(frozen=True)
class Comparison:
    """The largest differences over the steps, and which gradient it was."""

    loss: float
    gradient: float
    parameter: str

    def passed(self, bounds: Bounds) -> bool:
        """False also for a difference that is not a number."""
        return self.loss <= bounds.loss and self.gradient <= bounds.gradient


def compare(full: Training, compact: Training, *, gradient_steps: int | None = None) -> Comparison:
    """Compare the losses of every step, and the gradients of the first `gradient_steps`, on this rank.

    A value that is not finite differs infinitely.

    Raises `InputError` where the two have not taken the same steps over the same parameters.
    """
    steps = len(full.losses), len(full.gradients), len(compact.losses), len(compact.gradients)
    if len(set(steps)) != 1 or steps[0] == 0:
        raise InputError(f"needed two trainings of the same steps, at least one, got {steps[0]} and {steps[2]}")
    loss = max(abs(_finite(ours - theirs)) for ours, theirs in zip(compact.losses, full.losses, strict=True))
    gradient, parameter = 0.0, ""
    pairs = list(zip(full.gradients, compact.gradients, strict=True))
    for theirs, ours in pairs[:gradient_steps]:
        if theirs.keys() != ours.keys():
            raise InputError(f"needed gradients of the same parameters, got {set(theirs) ^ set(ours)} in one only")
        for name, expected in theirs.items():
            difference = (ours[name].double() - expected.double()).norm().item()
            norm = expected.double().norm().item()
            relative = difference / norm if norm else (math.inf if difference else 0.0)
            if _finite(relative) >= gradient:
                gradient, parameter = _finite(relative), name
    return Comparison(loss, gradient, parameter)


def worst(comparisons: list[Comparison]) -> Comparison:
    """The largest differences of several ranks."""
    gradient = max(comparisons, key=lambda comparison: comparison.gradient)
    return Comparison(max(c.loss for c in comparisons), gradient.gradient, gradient.parameter)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf
