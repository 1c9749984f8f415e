"""What slime's training step gives back beside its own metrics, and on which ranks a line is written."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from compact_logits.cli.cpu_model import cpu_megatron
from compact_logits.integrations.slime.passes import Pass, running
from compact_logits.integrations.slime.step import step_wrapper
from compact_logits.megatron import HeadMetrics, Request
from compact_logits.megatron.request import Outcome
from tests.support.gpt_paths import Cut, micro_batch
from tests.support.ranks import RankPool

LOSSES, GRAD_NORM = {"loss": 2.0}, 3.0
OF_A_STEP = {
    "compact_logits/micro_batches": 2,
    "compact_logits/rows": 112,
    "compact_logits/full_path_micro_batches": 1,
    "compact_logits/bytes_not_allocated": 700,
}


def one_step(rank: int, world: int, tp: int, pp: int, compacts: bool) -> tuple[dict[str, Any], list[str]]:
    of_head, said = HeadMetrics(), []
    request = Request(micro_batch(0, Cut(1), "holes").selection)

    def count(path: Any, **more: Any) -> None:
        request.outcome = Outcome(path, **more)
        of_head.record(request)

    def train_one_step(*args: Any, step_id: int) -> tuple[dict[str, float], float]:
        assert args == (7,) and step_id == 1
        count("compact", bytes_not_allocated=700)
        count("full", reason="on purpose")
        return LOSSES, GRAD_NORM

    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("compact_logits")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with cpu_megatron(rank, world, tp=tp, pp=pp), running(Pass(1.0, "loss") if compacts else None):
            count("compact", bytes_not_allocated=10**9)  # of a pass before, and no part of the step
            metrics, grad_norm = step_wrapper(train_one_step, of_head)(7, step_id=1)
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    assert grad_norm == GRAD_NORM
    return metrics, said


@pytest.mark.parametrize("compacts", [True, False])
@pytest.mark.parametrize(("tp", "pp", "counting", "writing"), [(1, 1, {0}, {0}), (2, 1, {0, 1}, {0}), (1, 2, {1}, {1})])
def test_the_last_stage_counts_and_its_first_rank_says_so(
    rank_pool: RankPool, tp: int, pp: int, counting: set[int], writing: set[int], compacts: bool
) -> None:
    for rank, (metrics, said) in enumerate(rank_pool.run(tp * pp, one_step, tp, pp, compacts)):
        assert LOSSES.items() <= metrics.items()
        if not compacts or rank not in counting:
            assert (metrics, said) == (LOSSES, [])
            continue
        assert OF_A_STEP.items() <= metrics.items()
        assert len(said) == (rank in writing) and all(line.startswith("compact_logits: ") for line in said)
