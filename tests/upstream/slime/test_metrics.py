"""The head's metrics are among those that slime itself logs of a training step."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.ranks import RankPool
from tests.upstream.slime.compact_path import compact_path
from tests.upstream.slime.harness import run_recipe, world_of
from tests.upstream.slime.recipes import LAYOUTS, RECIPES, Layout
from tests.upstream.slime.rollout import VOCAB
from tests.upstream.slime.tree import load_actor, needs_trees

pytestmark = needs_trees


def logged(rank: int, world: int, layout: Layout) -> tuple[list[dict[str, float]], list[str], list[int]]:
    """Of each step the metrics that slime has logged, our lines, and the kept rows of each micro-batch of a step."""
    load_actor()  # first of all, so that Megatron is the one slime pins
    from compact_logits.megatron import request as requests

    lines: list[str] = []
    kept: list[int] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("compact_logits")
    set_output = requests.Request.set_output

    def count(self: Any, output: Any) -> Any:
        if output.requires_grad:
            kept.append(self.selection.kept)
        return set_output(self, output)

    logger.addHandler(handler)
    level = logger.level
    # Not by the attribute, which leaves the level that earlier tests on this rank have set.
    logger.setLevel(logging.INFO)
    try:
        with world_of(rank, world, layout), patch.object(requests.Request, "set_output", count):
            metrics = run_recipe(RECIPES[0], layout, before=compact_path).metrics
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    steps: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        call, _, key = name.partition(" ")
        if key.startswith("train/compact_logits/"):
            steps.setdefault(call, {})[key.removeprefix("train/")] = value
    return list(steps.values()), [line for line in lines if line.startswith("compact_logits:")], kept


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[4]], ids=str)
def test_every_step_has_its_metrics_on_the_rank_that_logs(slime_ranks: RankPool, layout: Layout) -> None:
    (steps, lines, kept), *others = slime_ranks.run(layout.world, logged, layout)
    assert all(found == ([], [], found[2]) for found in others)
    assert len(steps) == len(lines) == RECIPES[0].steps
    per_step = len(kept) // len(steps)
    for number, (step, line) in enumerate(zip(steps, lines, strict=True)):
        mine = kept[number * per_step : (number + 1) * per_step]
        assert step["compact_logits/micro_batches"] == per_step == 2
        assert step["compact_logits/projected_rows"] == sum(mine) > 0
        assert step["compact_logits/full_path_micro_batches"] == 0
        rows, spared = step["compact_logits/rows"], step["compact_logits/bytes_not_allocated"]
        assert sum(mine) < rows and rows % (8 * layout.tp) == 0
        # Of each micro-batch all logits, where they fit 3 KiB, or one least slice of 64 columns.
        columns = VOCAB // layout.tp
        allocated = sum(4 * each * (columns if 4 * each * columns <= 3 * 2**10 else min(columns, 64)) for each in mine)
        assert 4 * rows * columns - spared == allocated
        assert spared / per_step <= step["compact_logits/most_bytes_not_allocated"] < spared
        assert line.startswith(f"compact_logits: projected {sum(mine)} of {rows} rows (")
        assert line.endswith("0 of 2 micro-batches on the full path")
