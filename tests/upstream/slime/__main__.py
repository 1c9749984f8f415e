"""Run every recipe on both paths in each layout of the feature table, and write down how it fared.

`SLIME_ROOT=... MEGATRON_ROOT=... python -m tests.upstream.slime [LAYOUT ...]`; with layouts, by number from 0, only
those are run, and the other columns stay as they are. Ends with 1 where the two paths differ, and then writes nothing.
"""

from __future__ import annotations

import sys
from contextlib import closing

from compact_logits.cli.slime_features import FEATURES, Feature, Features
from compact_logits.integrations.slime import SUPPORTED
from tests.support.ranks import RankPool
from tests.upstream.slime.recipes import EXTREME, RECIPES, REFUSED, TABLE_LAYOUTS
from tests.upstream.slime.verdicts import verdicts


def main(chosen: list[int]) -> int:
    recipes = [*RECIPES, *EXTREME, *REFUSED]
    columns: dict[str, dict[str, str]] = {}
    if FEATURES.exists():
        known = Features.read()
        for place, layout in enumerate(known.layouts):
            columns[layout] = {each.recipe: each.verdicts[place] for each in known.features}
    with closing(RankPool()) as ranks:
        for number in chosen:
            layout = TABLE_LAYOUTS[number]
            columns[str(layout)] = verdicts(ranks, layout, recipes, timeout=3600)
            print(f"{layout} done", file=sys.stderr)
    names = [str(layout) for layout in TABLE_LAYOUTS if str(layout) in columns]
    found = [
        Feature(each.name, each.flags, tuple(columns[name].get(each.name, "") for name in names)) for each in recipes
    ]
    features = Features("; ".join(SUPPORTED), tuple(names), tuple(found))
    print(features.markdown())
    if any(verdict.startswith("DIFFERS") for each in found for verdict in each.verdicts):
        return 1
    features.write()
    return 0


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]] or list(range(len(TABLE_LAYOUTS)))))
