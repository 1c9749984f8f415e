"""slime's own passes where context-parallel ranks even out the rows that they project."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from compact_logits.engine import balance
from tests.support.ranks import RankPool
from tests.upstream.slime.compare import EQUAL
from tests.upstream.slime.recipes import LAYOUTS, RECIPES, Layout, Recipe
from tests.upstream.slime.runs import both_paths
from tests.upstream.slime.tree import needs_trees
from tests.upstream.slime.verdicts import verdicts

pytestmark = needs_trees

_NAMES = ("grpo, entropy and kl", "grpo, tied head", "top-p 0.9", "one sample all masked", "two tokens a sample")


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.cp > 1], ids=str)
def test_every_number_is_the_full_path_s(
    slime_ranks: RankPool, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    monkeypatch.setenv("COMPACT_LOGITS_CP_BALANCE", "1")
    found = verdicts(slime_ranks, layout, [recipe for recipe in RECIPES if recipe.name in _NAMES])
    assert len(found) == len(_NAMES) and set(found.values()) == {EQUAL}, found


def exchanges(rank: int, world: int, layout: Layout, recipe: Recipe) -> int:
    """How often rows were sent there and back in the passes of one run."""
    calls = 0
    send = balance.return_rows

    def counted(*args: object) -> object:
        nonlocal calls
        calls += 1
        return send(*args)  # type: ignore[arg-type]

    with patch("compact_logits.megatron.kept_rows.return_rows", counted):
        both_paths(rank, world, layout, [recipe])
    return calls


@pytest.mark.parametrize(("asked", "happens"), [("0", False), ("1", True)])
def test_rows_are_exchanged_where_it_is_asked_for(
    slime_ranks: RankPool, monkeypatch: pytest.MonkeyPatch, asked: str, happens: bool
) -> None:
    monkeypatch.setenv("COMPACT_LOGITS_CP_BALANCE", asked)
    (recipe,) = [recipe for recipe in RECIPES if recipe.name == "two tokens a sample"]
    (layout,) = [layout for layout in LAYOUTS if layout.allgather_cp and "float32" in str(layout)]
    counts = slime_ranks.run(layout.world, exchanges, layout, recipe)
    assert len(set(counts)) == 1 and (counts[0] > 0) is happens
