"""The table of features that is shipped, printed and in README: of the recipes there are, as the arguments decide."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compact_logits.cli import main
from compact_logits.cli.launch_flags import read_flags
from compact_logits.cli.launch_script import read_arguments
from compact_logits.cli.slime_features import FEATURES, Feature, Features
from compact_logits.cli.slime_recipe import decide
from compact_logits.integrations.slime import SUPPORTED
from tests.support.source_tree import ROOT
from tests.upstream.slime.compare import EQUAL
from tests.upstream.slime.recipes import EXTREME, RECIPES, REFUSED, TABLE_LAYOUTS

TABLE = Features.read()
EVERY = [*RECIPES, *EXTREME, *REFUSED]
COLUMNS = [layout for layout in TABLE_LAYOUTS if str(layout) in TABLE.layouts]
REFUSED_NAMES = {recipe.name for recipe in REFUSED}


def test_it_is_of_all_recipes_and_layouts_and_of_the_supported_versions() -> None:
    assert TABLE.versions == "; ".join(SUPPORTED)
    assert list(TABLE.layouts) == list(map(str, COLUMNS)) and len(COLUMNS) == 5
    assert [(each.recipe, each.flags) for each in TABLE.features] == [(each.name, each.flags) for each in EVERY]


@pytest.mark.parametrize("recipe", EVERY, ids=str)
def test_each_cell_is_as_the_arguments_decide(recipe: Any) -> None:
    (found,) = [each for each in TABLE.features if each.recipe == recipe.name]
    assert len(found.verdicts) == len(COLUMNS)
    decision = decide(read_flags(read_arguments(recipe.flags or "--train-iters 1")))
    for layout, verdict in zip(COLUMNS, found.verdicts, strict=True):
        if recipe.needs_cp1 and layout.cp > 1:
            assert verdict == ""
        elif recipe.name in REFUSED_NAMES:
            (reason,) = {f"{row.flag}: {row.reason}" for row in decision.rows if row.verdict == "full path"}
            assert verdict.startswith(f"full path for the whole run: {reason}") and decision.refused
        else:
            assert verdict == EQUAL and not decision.refused


def test_readme_has_it() -> None:
    assert TABLE.markdown() in (ROOT / "README.md").read_text()


def test_the_doctor_prints_it(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert main(["doctor", "slime", "--slime=--use-opd", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["slime_features"] == json.loads(FEATURES.read_text())
    main(["doctor", "slime", "--slime=--use-opd"])
    printed = "".join(capsys.readouterr().out.split())
    for verdict, recipes in TABLE.by_verdict():
        for line in [*verdict.splitlines(), recipes.split(";")[0]]:
            assert "".join(line.split()) in printed
    assert f"Testedin{TABLE.layouts[0]}".replace(" ", "") in printed
    assert "testedwithslime624b824a8onMegatron-LM1dcf0dafa8" in printed


def test_written_and_read_it_is_the_same_and_condensed_by_verdict(tmp_path: Path) -> None:
    refused = "full path for the whole run: --kl-coef: it sums every row; remove it"
    features = Features(
        "slime 1",
        ("TP1", "TP2"),
        (
            Feature("grpo", "", (EQUAL, EQUAL)),
            Feature("ppo", "--kl-coef 1", (refused, refused)),
            Feature("reinforce++", "", (EQUAL, "")),
            Feature("gspo", "--x", (EQUAL, EQUAL)),
        ),
    )
    features.write(tmp_path / "table.json")
    assert Features.read(tmp_path / "table.json") == features != replace(features, versions="slime 2")
    assert features.by_verdict() == [
        ("compact, equal", "grpo; gspo"),
        ("full path: --kl-coef", "ppo"),
        ("TP1: compact, equal\nTP2: slime cannot", "reinforce++"),
    ]
    assert features.markdown().splitlines() == [
        "| recipe | TP1 | TP2 |",
        "| --- | --- | --- |",
        "| grpo; gspo | compact, equal | compact, equal |",
        "| ppo | full path: --kl-coef | full path: --kl-coef |",
        "| reinforce++ | compact, equal | slime cannot |",
    ]
