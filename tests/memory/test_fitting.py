"""The largest micro-batch that fits: more would not, and the search is short."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from compact_logits.memory import HeadSize, fitting, largest_fitting, simulate

SIZE = HeadSize(rows=512, kept=208, vocab=6016, hidden=48, tp=2, dtype=torch.float32, chunk_bytes=2**20)


@pytest.mark.parametrize(
    ("path", "budget"), [("full", 3 * 10**7), ("compact", 4 * 10**6), ("compact", 3 * 10**7), ("full", 10**8)]
)
@pytest.mark.parametrize("changed", [{}, {"fused": True}], ids=str)
def test_a_few_rows_more_do_not_fit(path: Any, budget: int, changed: dict) -> None:
    size = replace(SIZE, **changed)
    with mock.patch.object(fitting, "simulate", wraps=simulate) as simulated:
        most = largest_fitting(size, path, budget)
    assert most % 2 == 0 and simulated.call_count < 20
    more = most + max(2, most // 256 // 2 * 2)
    assert simulate(size.of_rows(most), path).peak <= budget < simulate(size.of_rows(more), path).peak


def test_nothing_fits_or_everything() -> None:
    assert largest_fitting(SIZE, "full", 1000) == largest_fitting(SIZE, "compact", 1000) == 0
    assert largest_fitting(SIZE, "full", 2**60) == fitting.MOST_ROWS
