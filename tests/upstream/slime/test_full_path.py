"""The harness itself: slime's full path runs, repeats itself, and says what the model says without slime."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from tests.support.ranks import RankPool
from tests.upstream.slime.compare import Tolerance, differences
from tests.upstream.slime.harness import Result
from tests.upstream.slime.recipes import LAYOUTS, RECIPES, REFUSED, Layout, Recipe
from tests.upstream.slime.runs import full_path, sequences_alone
from tests.upstream.slime.tree import needs_trees

pytestmark = needs_trees

EXACT = Tolerance(0.0, 0.0, 0.0)
GRPO = RECIPES[0]


def metrics_of(results: list[Result]) -> dict[str, float]:
    (logged,) = [result.metrics for result in results if any("train/loss" in name for name in result.metrics)]
    return {name: value for name, value in logged.items() if "grad_norm" not in name}  # this rank's own shards


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_run_repeats_itself_and_its_loss_is_that_of_one_rank(slime_ranks: RankPool, layout: Layout) -> None:
    results = slime_ranks.run(layout.world, full_path, layout, [GRPO, GRPO])
    for first, second in results:
        assert differences(first, second, EXACT) == []
        assert len(first.gradients) == GRPO.steps
        assert all(
            len(step) > 10 and all(g.isfinite().all() and g.any() for g in step.values()) for step in first.gradients
        )
    ((alone, _),) = slime_ranks.run(1, full_path, Layout(dtype=layout.dtype), [GRPO, GRPO])
    expected, found = metrics_of([alone]), metrics_of([first for first, _ in results])
    near = (
        pytest.approx(expected, rel=1e-4, abs=1e-5)
        if layout.dtype == torch.float32
        else pytest.approx(expected, abs=0.1)
    )
    assert found == near
    assert 0 < found["1 train/pg_clipfrac"] < 1 or layout.dtype == torch.bfloat16
    assert found["1 train/ppo_kl"] != 0 and found["1 train/kl_loss"] > 0


def test_log_probs_are_those_of_each_sequence_alone(slime_ranks: RankPool) -> None:
    recipe = Recipe("temperature", "--rollout-temperature 0.7")
    ((result,),) = slime_ranks.run(1, full_path, Layout(), [recipe])
    ((log_probs, entropies),) = slime_ranks.run(1, sequences_alone, Layout(), recipe)
    for name, expected in (("probe_log_probs", log_probs), ("probe_entropy", entropies)):
        for theirs, ours in zip(result.values[name], expected, strict=True):
            torch.testing.assert_close(theirs.double(), ours, rtol=0, atol=2e-5)


def test_every_recipe_is_another_computation(slime_ranks: RankPool) -> None:
    recipes = [*RECIPES, *REFUSED]
    (results,) = slime_ranks.run(1, full_path, Layout(), recipes)
    for one, other in combinations(range(len(recipes)), 2):
        found = differences(results[one], results[other], EXACT)
        told = [each for each in found if "gradient" in each or "metric" in each]
        assert told, f"{recipes[one]} and {recipes[other]} compute the same, so that one of them tests nothing"
