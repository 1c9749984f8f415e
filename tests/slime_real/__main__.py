"""Print how every recipe fares in every layout: `SLIME_ROOT=... MEGATRON_ROOT=... python -m tests.slime_real`."""

from __future__ import annotations

import sys
from contextlib import closing

from tests.slime_real.compare import table
from tests.slime_real.recipes import EXTREME, LAYOUTS, RECIPES, REFUSED
from tests.slime_real.verdicts import verdicts
from tests.support.ranks import RankPool

if __name__ == "__main__":
    found: dict[tuple[str, str], str] = {}
    with closing(RankPool()) as ranks:
        for layout in LAYOUTS:
            for recipe, text in verdicts(ranks, layout, [*RECIPES, *EXTREME, *REFUSED], timeout=3600).items():
                found[recipe, str(layout)] = text
            print(f"{layout} done", file=sys.stderr)
    print(table(found))
    sys.exit(any(text.startswith("DIFFERS") for text in found.values()))
