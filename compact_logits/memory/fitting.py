"""The largest micro-batch whose head stays within a number of bytes."""

from __future__ import annotations

from compact_logits.memory.simulate import Path, simulate
from compact_logits.memory.size import HeadSize

__all__ = ["MOST_ROWS", "largest_fitting"]

MOST_ROWS = 2**24


def largest_fitting(size: HeadSize, path: Path, budget: int) -> int:
    """The most rows of a micro-batch whose head stays within `budget` bytes, at `size`'s density; 0 if none does.

    In steps of `size.tp` rows, up to 2**24 rows. The bytes are nearly a straight line in the rows, so the search guesses
    along it, and halves what is left where that does not get there.
    """
    step = size.tp

    def peak(rows: int) -> int:
        return simulate(size.of_rows(rows), path).peak

    low, high = 0, step
    at_low, at_high = 0, peak(step)
    while at_high <= budget and high < MOST_ROWS:
        low, at_low = high, at_high
        high = min(high * 16, MOST_ROWS // step * step)
        at_high = peak(high)
    if at_high <= budget:
        return high
    halve = False
    while high - low > step:
        along = (budget - at_low) / (at_high - at_low)
        guess = low + (high - low) // 2 if halve else low + int((high - low) * along)
        guess = min(max(guess // step * step, low + step), high - step)
        width, halve = high - low, False
        at_guess = peak(guess)
        if at_guess <= budget:
            low, at_low = guess, at_guess
            # Along a straight line the next step is over already.
            if high - low > step and (at_next := peak(low + step)) > budget:
                high, at_high = low + step, at_next
        else:
            high, at_high = guess, at_guess
        halve = high - low > width // 2
    return low
