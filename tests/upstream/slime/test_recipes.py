"""slime's own passes over the compact path: the full path's log-probs, entropies, metrics and gradients, or itself."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks import RankPool
from tests.upstream.slime.compare import EQUAL, Tolerance, verdict
from tests.upstream.slime.recipes import EXTREME, LAYOUTS, PIPELINES, RECIPES, REFUSED, Layout
from tests.upstream.slime.runs import with_a_row_lost, with_wild_values_left
from tests.upstream.slime.tree import needs_trees
from tests.upstream.slime.verdicts import verdicts

pytestmark = needs_trees

# So few at a time, since each test has a few minutes, whatever else the machine does.
_SHARE = 5

# What the head itself does differently; the rest of a recipe computes in fp32 whatever the model's dtype.
_OF_THE_HEAD = (
    "grpo, entropy and kl",
    "grpo, tied head",
    "top-p 0.9",
    "one sample all masked",
    "two tokens a sample",
)


@pytest.mark.parametrize("start", range(0, len(RECIPES), _SHARE))
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.dtype == torch.float32], ids=str)
def test_every_number_is_the_full_path_s(slime_ranks: RankPool, layout: Layout, start: int) -> None:
    found = verdicts(slime_ranks, layout, RECIPES[start : start + _SHARE])
    assert found and set(found.values()) == {EQUAL}, found


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.dtype == torch.bfloat16], ids=str)
def test_so_is_every_number_of_a_model_in_bf16(slime_ranks: RankPool, layout: Layout) -> None:
    found = verdicts(slime_ranks, layout, [recipe for recipe in RECIPES if recipe.name in _OF_THE_HEAD])
    assert len(found) == len(_OF_THE_HEAD) and set(found.values()) == {EQUAL}, found


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[7]], ids=str)
def test_one_chunk_for_all_rows_does_as_well(
    slime_ranks: RankPool, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    monkeypatch.setenv("COMPACT_LOGITS_CHUNK_BYTES", "64MiB")
    found = verdicts(slime_ranks, layout, RECIPES[:2])
    assert len(found) == 2 and set(found.values()) == {EQUAL}, found


@pytest.mark.parametrize("layout", PIPELINES, ids=str)
def test_pipeline_stages_compact_where_the_head_is(slime_ranks: RankPool, layout: Layout) -> None:
    recipes = [recipe for recipe in RECIPES if recipe.masks != "turns" or recipe.model or "loss reused" in recipe.name]
    found = verdicts(slime_ranks, layout, recipes)
    assert len(found) == 5 and set(found.values()) == {EQUAL}, found


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


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[4], LAYOUTS[6]], ids=str)
def test_wild_log_probs_of_masked_tokens_reach_nothing(slime_ranks: RankPool, layout: Layout) -> None:
    found = verdicts(slime_ranks, layout, EXTREME)
    assert len(found) == (4 if layout.cp == 1 else 3) and set(found.values()) == {EQUAL}, found


def test_left_as_they_are_they_reach_loss_and_metrics(slime_ranks: RankPool) -> None:
    ((pairs),) = slime_ranks.run(1, with_wild_values_left, Layout(), EXTREME)
    found = [verdict([full], [ours], Tolerance.of(Layout().dtype), ("rollout/kl",)) for full, ours in pairs]
    assert all("nan" in each or "inf" in each for each in found), found


def test_one_row_overlooked_is_noticed(slime_ranks: RankPool) -> None:
    ((full, ours),) = slime_ranks.run(1, with_a_row_lost, Layout(), RECIPES[0])
    found = verdict([full], [ours], Tolerance.of(Layout().dtype))
    assert found.startswith("DIFFERS") and "log_probs" in found
