"""What the project file, the packaging, the README and the change log promise."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from compact_logits.config import Config
from compact_logits.errors import ConfigError
from tests.support.source_tree import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    content: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return content


def constraints() -> list[Requirement]:
    lines = (ROOT / "tools/constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pinned(name: str, python: str) -> str:
    """The one version of `name` that the constraint file allows on that Python."""
    found = [
        str(requirement.specifier).removeprefix("==")
        for requirement in constraints()
        if requirement.name == name
        and (requirement.marker is None or requirement.marker.evaluate({"python_version": python}))
    ]
    assert len(found) == 1, found
    return found[0]


def commands(text: str) -> list[str]:
    """The lines of the fenced shell blocks of a Markdown text, and its code spans."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()] + re.findall(r"`([^`]+)`", prose)


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
def test_pinned_versions_are_those_the_package_accepts(project: dict[str, Any], python: str) -> None:
    assert SpecifierSet(project["requires-python"]).contains(python)
    assert pinned("torch", python) == "2.13.0"
    assert pinned("megatron-core", python) == ("0.19.2" if python == "3.12" else "0.16.1")
    required = {Requirement(line).name: Requirement(line) for line in project["dependencies"]}
    assert set(required) == {"torch", "einops", "megatron-core"}
    for name in ("torch", "megatron-core"):
        assert required[name].specifier.contains(pinned(name, python))


def test_a_megatron_from_source_counts_and_no_prerelease_is_fetched(project: dict[str, Any]) -> None:
    specifier = next(
        Requirement(line).specifier for line in project["dependencies"] if line.startswith("megatron-core")
    )
    # This is how pip judges what is installed already, and what it may fetch.
    assert all(specifier.contains(version, prereleases=True) for version in ("0.16.0rc0", "0.16.0rc0+1dcf0dafa8"))
    assert not specifier.prereleases
    assert list(specifier.filter(["0.15.3", "0.16.0rc0", "0.16.1", "0.19.2", "0.20.0rc1"])) == ["0.16.1", "0.19.2"]


def test_the_matrix_begins_with_the_oldest_and_has_every_version(project: dict[str, Any]) -> None:
    tox = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["tox"]
    assert set(tox["env_list"]) == set(tox["env"])
    needed = {name: [Requirement(line) for line in tox["env"][name]["deps"]] for name in tox["env_list"]}
    exact = {name: {each.name: str(each.specifier) for each in deps} for name, deps in needed.items()}
    oldest = exact[tox["env_list"][0]]
    bounds = {Requirement(line).name: Requirement(line).specifier for line in project["dependencies"]}
    for name in ("torch", "einops"):
        (lower,) = [each.version for each in bounds[name] if each.operator == ">="]
        assert oldest[name] == f"=={lower}.0"
    for line in project["optional-dependencies"]["cli"]:
        requirement = Requirement(line)
        assert oldest[requirement.name].startswith("==" + str(requirement.specifier).removeprefix(">="))
    pythons = {line.rpartition(" ")[2].replace(".", "") for line in project["classifiers"] if ":: 3." in line}
    assert {name.partition("-")[0].removeprefix("py") for name in exact} == pythons
    every = {spec for deps in exact.values() for name, spec in deps.items() if name == "megatron-core"}
    assert every == {"==0.16.1", "==0.17.1", "==0.18.2", "==0.19.2", ""}
    assert {deps["torch"] for deps in exact.values()} == {"==2.6.0", "==2.13.0", ""}


@pytest.mark.once
def test_the_matrix_names_its_environments() -> None:
    if not (ROOT / ".venv").exists():
        pytest.skip("not where tools/test runs: the project's own virtual environment is not there")
    told = subprocess.run(["tools/matrix", "list"], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert told.returncode == 0, told.stderr
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["tox"]["env_list"]
    assert all(f"{name} " in told.stdout for name in names)


def test_the_wheel_holds_the_marker_of_types_and_all_data(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    package = {path for path in (ROOT / "compact_logits").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {str(path.relative_to(ROOT)) for path in package} <= packed
    assert "compact_logits/py.typed" in packed
    assert [name for name in packed if re.fullmatch(r"compact_logits/cli/data/\w+\.jsonl", name)]
    assert {name.split("/")[0] for name in packed if ".dist-info/" not in name} == {"compact_logits"}


def test_the_script_of_the_project_file_exists(project: dict[str, Any]) -> None:
    assert project["scripts"] == {"compact-logits": "compact_logits.cli:main"}
    from compact_logits.cli import main

    assert callable(main)


def test_the_change_log_begins_with_this_version(project: dict[str, Any]) -> None:
    versions = re.findall(r"^## (\d[\w.]*)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions[0] == project["version"]


def test_every_command_of_the_readme_exists() -> None:
    lines = commands((ROOT / "README.md").read_text())
    tools = {match for line in lines for match in re.findall(r"(?:^|\s)(tools/[\w-]+)", line)}
    assert {"tools/demo", "tools/test"} <= tools
    for tool in tools:
        assert (ROOT / tool).stat().st_mode & 0o111, f"{tool} cannot be run"
    flags: dict[str, set[str]] = {}
    for line in lines:
        if match := re.search(r"(?:compact-logits |compact_logits |tools/)(demo|doctor|plan|bench)\b(.*)", line):
            flags.setdefault(match[1], set()).update(re.findall(r"\s(--[\w-]+)", match[2]))
    assert "demo" in flags
    for command, named in flags.items():
        call = [sys.executable, "-m", "compact_logits", command, "--help"]
        done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        missing = {flag for flag in named if flag not in done.stdout}
        assert not missing, f"README names {missing}, which `compact-logits {command}` does not have"


def test_every_setting_is_in_the_readme() -> None:
    with pytest.raises(ConfigError) as unknown:
        Config.from_env({"COMPACT_LOGITS_NO_SUCH_NAME": "1"})
    names = set(re.findall(r"COMPACT_LOGITS\w*", str(unknown.value))) - {"COMPACT_LOGITS_NO_SUCH_NAME"}
    assert len(names) >= 2
    readme = (ROOT / "README.md").read_text()
    assert not {name for name in names if f"`{name}`" not in readme}
    with pytest.raises(ConfigError) as wrong:
        Config.from_env({"COMPACT_LOGITS": "no such value"})
    values = re.search(r"must be (.*), got", str(wrong.value))
    assert values and all(f"`{value}`" in readme for value in re.findall(r"\b(?:0|1|strict)\b", values[1]))


def test_ci_runs_the_commands_that_developers_run() -> None:
    text = (ROOT / ".ci/run").read_text()
    assert re.search(r"^tools/check\b", text, flags=re.MULTILINE)
    assert re.search(r"^tools/package$", text, flags=re.MULTILINE)
    assert re.search(r"^tools/test --all$", text, flags=re.MULTILINE)
    assert re.search(r"^ *PYTHON=python3.12 tools/test --all\b", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "script", [*sorted(f"tools/{path.name}" for path in ROOT.glob("tools/*") if path.suffix != ".txt"), ".ci/run"]
)
def test_scripts_parse_and_stop_at_the_first_error(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
    assert "\nset -euo pipefail\n" in (ROOT / script).read_text()
