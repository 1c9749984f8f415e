"""What slime's recipes came to in each layout, as the test that runs them on both paths has found and written down."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FEATURES", "Feature", "Features"]

FEATURES = Path(__file__).parent / "data" / "slime_features.json"

_EQUAL = "compact, equal"


@dataclass(frozen=True)
class Feature:
    """A recipe, the flags that make it, and its verdict in each layout; empty where slime itself cannot run it."""

    recipe: str
    flags: str
    verdicts: tuple[str, ...]


@dataclass(frozen=True)
class Features:
    """The whole table. `versions` says of slime and Megatron what it is true of."""

    versions: str
    layouts: tuple[str, ...]
    features: tuple[Feature, ...]

    @classmethod
    def read(cls, path: Path = FEATURES) -> Features:
        found = json.loads(path.read_text())
        features = [Feature(each["recipe"], each["flags"], tuple(each["verdicts"])) for each in found["features"]]
        return cls(found["versions"], tuple(found["layouts"]), tuple(features))

    def write(self, path: Path = FEATURES) -> None:
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n")

    def as_json(self) -> dict[str, object]:
        features = [
            {"recipe": each.recipe, "flags": each.flags, "verdicts": list(each.verdicts)} for each in self.features
        ]
        return {"versions": self.versions, "layouts": list(self.layouts), "features": features}

    def condensed(self) -> list[tuple[str, ...]]:
        """One row for all recipes that fared alike in every layout: their names, and short verdicts."""
        rows: dict[tuple[str, ...], list[str]] = {}
        for each in self.features:
            rows.setdefault(tuple(map(_short, each.verdicts)), []).append(each.recipe)
        return [("; ".join(recipes), *verdicts) for verdicts, recipes in rows.items()]

    def by_verdict(self) -> list[tuple[str, str]]:
        """The condensed table in two columns, what came of it and of which recipes; layouts apart where they differ."""
        rows = []
        for recipes, *verdicts in self.condensed():
            apart = "\n".join(f"{layout}: {each}" for layout, each in zip(self.layouts, verdicts, strict=True))
            rows.append((verdicts[0] if len(set(verdicts)) == 1 else apart, recipes))
        return rows

    def markdown(self) -> str:
        """The condensed table, as README has it."""
        rows = [("recipe", *self.layouts), ("---",) * (len(self.layouts) + 1), *self.condensed()]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _short(verdict: str) -> str:
    if not verdict:
        return "slime cannot"
    if verdict == _EQUAL:
        return verdict
    kind, _, rest = verdict.partition(": ")
    return f"{kind.removesuffix(' for the whole run')}: {rest.partition(':')[0]}"
