"""The decision table of a slime recipe: every flag that the integration looks at, and the verdict it comes to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compact_logits.cli import main
from compact_logits.cli.launch_flags import read_flags
from compact_logits.cli.launch_script import read_arguments, read_launch_script
from compact_logits.cli.slime_recipe import LOOKED_AT, Decision, decide
from compact_logits.integrations.slime.recipe import refusals
from tests.support.source_tree import ROOT
from tests.upstream.slime.recipes import RECIPES, REFUSED, Recipe

NAMES = {flag.strip("-").replace("-", "_"): flag for flag in LOOKED_AT}
HOOK = "--custom-megatron-init-path compact_logits.integrations.slime.install"


def decision(arguments: str, **options: Any) -> Decision:
    return decide(read_flags(read_arguments(arguments)), **options)


def doctor(capsys: Any, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "slime", "--json", *arguments])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, report


class Seen:
    """Arguments that remember which of them were looked at."""

    def __init__(self, **values: Any) -> None:
        self.values = values
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.names.add(name)
        if name in self.values:
            return self.values[name]
        raise AttributeError(name)


def test_the_table_has_every_flag_that_the_integration_looks_at_and_no_other() -> None:
    seen: set[str] = set()
    for values in ({}, {"use_opsm": True, "loss_type": "custom_loss", "custom_tis_function_path": "x.y"}):
        arguments = Seen(**values)
        refusals(arguments)  # type: ignore[arg-type]
        seen |= arguments.names
    assert seen == set(NAMES)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_recipes_that_train_the_same_on_both_paths_are_compact(recipe: Recipe) -> None:
    """Each of them is run through slime's own actor, on both paths, in tests/upstream/slime."""
    found = decision(recipe.flags)
    assert found.verdict in ("compact", "compact with another metric") and not found.refused
    if found.verdict == "compact with another metric":
        assert recipe.unmasked_metrics
        assert decision(recipe.flags, strict=True).refused


@pytest.mark.parametrize("recipe", REFUSED, ids=str)
def test_recipes_left_to_the_full_path_are_refused_with_flag_reason_and_remedy(recipe: Recipe) -> None:
    found = decision(recipe.flags)
    assert found.verdict == "full path" and found.refused
    rows = [row for row in found.rows if row.verdict == "full path"]
    assert rows and all(row.reason and row.remedy and not row.assumed for row in rows)


def test_defaults_are_said_to_be_assumed() -> None:
    rows = {row.flag: row for row in decision("--kl-coef 0.0 --use-opd").rows}
    assert len(rows) == len(LOOKED_AT)
    assert (rows["--kl-coef"].value, rows["--kl-coef"].assumed) == ("0.0", False)
    assert (rows["--use-opd"].value, rows["--use-opd"].assumed) == ("given", False)
    assert (rows["--advantage-estimator"].value, rows["--advantage-estimator"].assumed) == ("grpo", True)
    assert (rows["--label-smoothing"].value, rows["--dump-details"].value) == ("0.0", "not given")


@pytest.mark.parametrize(
    ("arguments", "verdict", "unknown"),
    [
        ("--kl-coef ${KL} --advantage-estimator ppo", "unknown", ["--kl-coef is ${KL}"]),
        # Whatever it is: a KL in the reward of GRPO changes a metric at most, but that is another verdict.
        ("--kl-coef ${KL}", "unknown", ["--kl-coef is ${KL}"]),
        # Whatever it is, the custom code decides.
        ("--kl-coef ${KL} --custom-advantage-function-path a.b", "full path", ["--kl-coef is ${KL}"]),
        ("--custom-tis-function-path $FUNCTION", "unknown", ["--custom-tis-function-path is ${FUNCTION}"]),
        ("--use-opd ${EXTRA[@]}", "compact", ["${EXTRA[@]} may hold more flags"]),
        ("--cuda-graph-scope attn full_iteration", "full path", []),
        ("--cuda-graph-scope attn", "compact", []),
        ("--cuda-graph-scope $SCOPE", "unknown", ["--cuda-graph-scope is ${SCOPE}"]),
        # No number: slime's own parser will say so.
        ("--label-smoothing some", "full path", []),
        (
            "--custom-config-path m.yaml",
            "compact",
            ["--custom-config-path m.yaml sets flags in a file that is not read"],
        ),
        ("--kl-coef", "unknown", ["--kl-coef is given"]),
    ],
)
def test_what_is_not_known_is_named_and_decides_nothing(arguments: str, verdict: str, unknown: list[str]) -> None:
    found = decision(arguments)
    assert (found.verdict, found.unknown) == (verdict, unknown)


def test_more_that_is_not_known_than_can_be_tried_out() -> None:
    """Even where each way would come to the same: sixteen flags have 65,536 together."""
    of_values = [flag for flag, spec in LOOKED_AT.items() if spec.kind != "switch"]
    found = decision(" ".join(f"{flag} $X" for flag in of_values) + " --use-rollout-entropy")
    assert found.verdict == "unknown" and len(found.unknown) == len(of_values) > 12
    assert {row.verdict for row in found.rows} == {"unknown"} and not any(row.reason for row in found.rows)


def test_a_flag_in_a_branch_may_or_may_not_be_given(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text('if [ "$D" ]; then\n  A+=(--dump-details /d)\nfi\npython train.py --use-opd ${A[@]}\n')
    found = decide(read_flags(read_launch_script(script)))
    assert found.verdict == "unknown"
    assert found.unknown == ["--dump-details is /d (in a branch of the script)"]
    assert next(row for row in found.rows if row.flag == "--dump-details").verdict == "unknown"


def test_the_last_use_counts() -> None:
    assert decision("--kl-coef 0.1 --kl-coef 0").verdict == "compact"
    assert decision("--advantage-estimator ppo --kl-coef 0 --kl-coef=0.1").verdict == "full path"


def test_the_command_ends_with_1_where_the_recipe_is_refused(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMPACT_LOGITS", raising=False)
    code, report = doctor(capsys, "--slime", f"{HOOK} --kl-coef 0.1")
    recipe = report["slime_recipe"]
    assert code == 0 and recipe["verdict"] == "compact with another metric" and recipe["installs"] is True
    monkeypatch.setenv("COMPACT_LOGITS", "strict")
    code, report = doctor(capsys, "--slime", "--kl-coef 0.1")
    assert code == 1 and report["slime_recipe"]["verdict"] == "full path"
    monkeypatch.delenv("COMPACT_LOGITS")
    code, report = doctor(capsys, "--slime=--use-rollout-entropy")
    assert code == 1 and report["slime_recipe"]["installs"] is False and report["refused"] is True


def test_the_table_is_printed(capsys: Any, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python train.py --use-opsm --use-opd ${X[@]} \"$(printf '\\033[31m')\"\n")
    assert main(["doctor", "slime", "--slime", str(script)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for said in (
        "--kl-coef │ 0.0 (assumed) │ compact",
        "verdict: compact with another metric as far as is known",
        "24 of 26 flags are not given",
        "not known: ${X[@]} may hold more flags",
        f"not switched on by this recipe: add {HOOK}",
        "not set by this recipe: COMPACT_LOGITS=1",
        "--use-opsm given: the metric opsm_clipfrac counts the advantage signs of every row; remove the flag",
    ):
        assert said in printed
    assert "\033" not in printed
    assert main(["doctor", "slime", "--slime", f"COMPACT_LOGITS=1 python train.py {HOOK}"]) == 0
    printed = capsys.readouterr().out
    assert "not switched on" not in printed and "not set by this recipe" not in printed
    script.write_text("source /no/such.sh\npython train.py\n")
    assert main(["doctor", "slime", "--slime", str(script)]) == 0
    assert "note: sourced file /no/such.sh was not read" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "--slime needs a launch script or its arguments, got an empty text"),
        ("no/such/run.sh", "needed a readable launch script: No such file or directory"),
        ("--a 'open", "line 1: ' is never closed"),
        ("x" * 5000, "needed a readable launch script: File name too long"),
        ("a\0b", "needed a readable launch script"),
    ],
    ids=range(5),
)
def test_wrong_use_ends_with_2_and_one_line(capsys: Any, value: str, said: str) -> None:
    assert main(["doctor", "--json", f"--slime={value}"]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    (line,) = streams.err.splitlines()
    assert line.startswith("compact-logits doctor: ") and said in line


PARSE = """
import json
from tests.upstream.slime.tree import parse_flags
args = vars(parse_flags(""))
print(json.dumps({name: args[name] for name in %r if name in args}))
"""


@pytest.mark.skipif(
    not (os.environ.get("SLIME_ROOT") and os.environ.get("MEGATRON_ROOT")),
    reason="SLIME_ROOT and MEGATRON_ROOT do not name slime's source tree and that of its Megatron",
)
def test_the_defaults_are_those_of_slimes_own_parser() -> None:
    call = [sys.executable, "-c", PARSE % (sorted(NAMES),)]
    said = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert said.returncode == 0, said.stderr
    defaults = json.loads(said.stdout.splitlines()[-1])
    assert len(defaults) >= 15
    assert {NAMES[name]: value for name, value in defaults.items()} == {
        NAMES[name]: LOOKED_AT[NAMES[name]].default for name in defaults
    }


def test_the_defaults_of_megatrons_flags_are_those_of_its_configuration() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = TransformerConfig.__dataclass_fields__
    for name in ("cuda_graph_impl", "defer_embedding_wgrad_compute", "batch_invariant_mode"):
        if name in fields:
            assert fields[name].default == LOOKED_AT[NAMES[name]].default, name


@pytest.mark.skipif(not os.environ.get("SLIME_ROOT"), reason="SLIME_ROOT does not name slime's source tree")
def test_every_launch_script_that_slime_ships_is_read() -> None:
    scripts = sorted(Path(os.environ["SLIME_ROOT"]).glob("scripts/run-*.sh"))
    assert len(scripts) >= 15
    for script in scripts:
        found = decide(read_flags(read_launch_script(script)))
        mtp = "\n   --enable-mtp-training" in script.read_text()
        assert found.refused == mtp, script.name
