"""Many chunks are simulated as two and as three: the bytes must be those of simulating them all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compact_logits.memory import HeadSize, simulate
from compact_logits.memory.simulate import _plan, _run, _worst

SIZE = HeadSize(rows=4096, kept=2048, vocab=6016, hidden=512, tp=2, fused=True, entropy="metric", chunk_bytes=2**21)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"rows": 32768},  # the gradient of all rows is the most, until enough are kept
        {"rows": 32768, "kept": 14000, "hidden": 64},
        {"kept": 4096},  # gathering rows is the most of forward, once enough are
        {"most_on_shard": 2000},
        {"tp": 1, "rows": 16384, "fused": False},
        {"sequence_parallel": False},
        {"nucleus_ids": 7, "kept": 900},
        {"top_k": 16, "kept": 900},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_extrapolated_over_chunks(changed: dict) -> None:
    size = replace(SIZE, **changed)
    guess, all_chunks = simulate(size, "compact"), _worst(_run(size, "compact", _plan(size)))
    for name in ("forward", "saved", "backward"):
        assert getattr(guess, name) == pytest.approx(getattr(all_chunks, name), rel=0.01), name
