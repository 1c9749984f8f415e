"""The largest micro-batch whose head stays within a number of bytes."""

from __future__ import annotations

from compact_logits.memory.simulate import Path, simulate
from compact_logits.memory.size import HeadSize

__all__ = ["MOST_ROWS", "largest_fitting"]

MOST_ROWS = 2**24


def largest_fitting(size: HeadSize, path: Path, budget: int) -> int:
    """The most rows of a micro-batch whose head stays within `budget` bytes, at `size`'s density; 0 if none does.

    To within one part in 256, in steps of `size.tp` rows, up to 2**24 rows. The bytes are nearly a straight line in
    the rows, so each simulation is just before or just after where that line meets the budget, and farther from there
    each time that it does not close in from the other side.
    """
    step = size.tp
    most = MOST_ROWS // step * step
    low, at_low = 0, 0
    high, at_high = most + step, 0  # nothing is known not to fit while `at_high` is 0
    guess, margin, fitted = min(size.rows, most), 0.001, None
    while low < most and high - low > max(step, low // 256):
        at_guess = simulate(size.of_rows(guess), path).peak
        fits = at_guess <= budget
        if fits:
            line = (at_guess - at_low) / (guess - low)  # bytes a row
            low, at_low = guess, at_guess
        else:
            high, at_high = guess, at_guess
        if at_high:
            line = (at_high - at_low) / (high - low)
        meets = low + (budget - at_low) / max(line, 1.0)
        margin = margin * 4 if fits is fitted else 0.001
        fitted = fits
        guess = round(meets * (1 + margin if fits else 1 - margin))
        guess = min(max(guess // step * step, low + step), high - step)
    return low
