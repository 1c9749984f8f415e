"""slime's own passes over the compact path: the full path's log-probs, entropies, metrics and gradients, or itself."""

from __future__ import annotations

import pytest

from tests.slime_real.compare import EQUAL, Tolerance, verdict
from tests.slime_real.recipes import LAYOUTS, RECIPES, REFUSED, Layout
from tests.slime_real.runs import with_a_row_lost
from tests.slime_real.tree import needs_trees
from tests.slime_real.verdicts import verdicts
from tests.support.ranks import RankPool

pytestmark = needs_trees

# So many at a time, since entering a layout costs more than a recipe.
_SHARE = 8


@pytest.mark.parametrize("start", range(0, len(RECIPES), _SHARE))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_number_is_the_full_path_s(slime_ranks: RankPool, layout: Layout, start: int) -> None:
    found = verdicts(slime_ranks, layout, RECIPES[start : start + _SHARE])
    assert found and set(found.values()) == {EQUAL}, found


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[4]], ids=str)
def test_what_is_not_proven_runs_as_if_nothing_were_installed(slime_ranks: RankPool, layout: Layout) -> None:
    found = verdicts(slime_ranks, layout, REFUSED)
    assert {name: reason.split(": ")[:2] for name, reason in found.items()} == {
        "ppo, kl in the reward": ["full path for the whole run", "--kl-coef"],
        "rollout entropy": ["full path for the whole run", "--use-rollout-entropy"],
        "custom loss": ["full path for the whole run", "--loss-type"],
        "custom advantage": ["full path for the whole run", "--custom-advantage-function-path"],
        "custom reducer": ["full path for the whole run", "--custom-pg-loss-reducer-function-path"],
        "custom tis": ["full path for the whole run", "--custom-tis-function-path"],
        "masks enlarged after the log-probs": ["full path for the whole run", "--rollout-data-postprocess-path"],
    }


def test_one_row_overlooked_is_noticed(slime_ranks: RankPool) -> None:
    ((full, ours),) = slime_ranks.run(1, with_a_row_lost, Layout(), RECIPES[0])
    found = verdict([full], [ours], Tolerance.of(Layout().dtype))
    assert found.startswith("DIFFERS") and "log_probs" in found
