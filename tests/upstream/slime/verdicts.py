"""Recipes over both paths in one layout, and what the comparison says of each."""

from __future__ import annotations

from tests.support.ranks import RankPool
from tests.upstream.slime.compare import Tolerance, verdict
from tests.upstream.slime.recipes import Layout, Recipe
from tests.upstream.slime.runs import both_paths

__all__ = ["verdicts"]


def verdicts(ranks: RankPool, layout: Layout, recipes: list[Recipe], timeout: float = 280.0) -> dict[str, str]:
    """How each recipe fared, by name, over all ranks; without those that slime itself cannot run in the layout."""
    fitting = [recipe for recipe in recipes if layout.cp == 1 or not recipe.needs_cp1]
    results = ranks.run(layout.world, both_paths, layout, fitting, timeout=timeout)
    found = {}
    for recipe, pairs in zip(fitting, zip(*results, strict=True), strict=True):
        full, ours = zip(*pairs, strict=True)
        found[str(recipe)] = verdict(full, ours, Tolerance.of(layout.dtype), recipe.unmasked_metrics)
    return found
