"""The doctor: what it finds of versions, seam, setting and integrations, how it ends, and that it never falls over."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compact_logits.cli import environment, main
from compact_logits.cli.environment import find_diagnostics, find_kernels, find_seam, find_versions, read_setting
from compact_logits.diagnostics import Diagnostic
from compact_logits.engine.kernels.verify import Verdict
from compact_logits.integrations import INTEGRATIONS
from tests.support.source_tree import ROOT


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("COMPACT_LOGITS"):
            monkeypatch.delenv(name)


def doctor(capsys: Any, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *arguments])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, report


def stand_in(monkeypatch: pytest.MonkeyPatch, check: Callable[[], list[Diagnostic]]) -> None:
    """slime's integration with another `check`."""
    from compact_logits.integrations import slime

    monkeypatch.setattr(slime, "check", check)


def test_every_integration_is_registered_and_has_the_four_names() -> None:
    folder = ROOT / "compact_logits/integrations"
    assert set(INTEGRATIONS) == {path.parent.name for path in folder.glob("*/__init__.py")}
    for name in INTEGRATIONS:
        module = importlib.import_module(f"compact_logits.integrations.{name}")
        assert isinstance(module.SUPPORTED, tuple) and all(isinstance(each, str) for each in module.SUPPORTED)
        assert all(callable(getattr(module, each)) for each in ("check", "install", "uninstall"))


def test_versions_are_those_that_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan/__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {version.name: version for version in find_versions()}
    assert found["python"].version == ".".join(map(str, sys.version_info[:3]))
    # The build's local label is not in every wheel's metadata.
    assert (found["torch"].version or "").split("+")[0] == torch.__version__.split("+")[0]
    assert found["torch"].location == str(Path(torch.__file__).parent)
    assert found["torchtitan"].version == "unknown" and found["torchtitan"].location == str(tmp_path / "torchtitan")
    assert found["compact-logits"].location == str(ROOT / "compact_logits")


def test_the_seam_is_told_by_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.models.gpt import GPTModel

    def old(self, hidden_states, labels, loss_mask, runtime_gather_output, inference_context): ...

    def new(self, hidden_states, labels, loss_mask, runtime_gather_output, inference_context, output_processor=None,
            output_processor_context=None): ...  # fmt: skip

    def other(self, hidden_states, labels): ...

    for function, kind, said in (
        (old, "guarded patch", "takes no output_processor"),
        (new, "official output processor", "takes output_processor and output_processor_context"),
        (other, "none", "has no parameter loss_mask"),
    ):
        monkeypatch.setattr(GPTModel, "_postprocess", function)
        seam = find_seam()
        assert seam.kind == kind and said in seam.reason
    monkeypatch.delattr(GPTModel, "_postprocess")
    assert find_seam().kind == "none"


@pytest.mark.parametrize(
    ("variables", "mode", "error"),
    [
        ({}, "off", ""),
        ({"COMPACT_LOGITS": "1"}, "on", ""),
        ({"COMPACT_LOGITS": "strict", "COMPACT_LOGITS_CHUNK_BYTES": "1MiB"}, "strict", ""),
        ({"COMPACT_LOGITS": "yes"}, None, "COMPACT_LOGITS must be unset, 0, 1 or strict, got 'yes'"),
        ({"COMPACT_LOGITS_CHUNKS": "1"}, None, "unknown environment variable COMPACT_LOGITS_CHUNKS"),
        ({"COMPACT_LOGITS": "1", "COMPACT_LOGITS_CHUNK_BYTES": "x"}, None, "COMPACT_LOGITS_CHUNK_BYTES: a byte count"),
    ],
)
def test_the_setting_and_whether_it_is_valid(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, variables: dict[str, str], mode: str | None, error: str
) -> None:
    setting = read_setting({"HOME": "/root", **variables})
    assert setting.variables == variables
    assert (setting.config.mode if setting.config else None) == mode and error in setting.error
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stand_in(monkeypatch, lambda: [Diagnostic("slime", "off")])
    code, report = doctor(capsys, "slime")
    assert code == (1 if error else 0)
    assert report["setting"]["valid"] is (not error) and report["setting"]["mode"] == mode
    assert main(["doctor", "slime"]) == code
    printed = " ".join(capsys.readouterr().out.split())
    assert ("not valid" in printed) == bool(error) and error[:20] in printed


def test_a_setting_that_is_not_valid_is_each_integration_s_reason(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("COMPACT_LOGITS", "perhaps")
    code, report = doctor(capsys, "verl")
    assert code == 1
    for found in report["integrations"]:
        assert found["state"] == "refused" and found["remedy"] == "correct the environment variable"
        assert found["reason"].startswith("COMPACT_LOGITS must be unset, 0, 1 or strict, got 'perhaps'")


def test_a_refusal_ends_with_1_only_where_something_was_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    stand_in(monkeypatch, lambda: [Diagnostic("slime", "refused", "another version", "use this one")])
    assert doctor(capsys, "slime")[0] == 0
    monkeypatch.setenv("COMPACT_LOGITS", "1")
    code, report = doctor(capsys, "slime")
    assert code == 1
    assert report["integrations"] == [
        {"name": "slime", "state": "refused", "reason": "another version", "remedy": "use this one"}
    ]
    assert main(["doctor", "slime"]) == 1
    printed = capsys.readouterr().out
    assert all(said in printed for said in ("refused", "another version", "use this one", "seam"))
    stand_in(monkeypatch, lambda: [Diagnostic("slime", "on", "installed")])
    assert doctor(capsys, "slime")[0] == 0


def test_a_framework_that_cannot_be_imported_hides_no_other(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def broken() -> list[Diagnostic]:
        print("noise on standard output")
        raise OSError("libcuda.so.1:\n  cannot open shared object file")

    stand_in(monkeypatch, broken)
    found = find_diagnostics(("slime", "torchforge"))
    assert [each.name for each in found] == ["slime", "torchforge"]
    assert found[0].state == "refused"
    assert found[0].reason == "it cannot be looked at: OSError: libcuda.so.1: cannot open shared object file"
    assert capsys.readouterr().out == ""
    stand_in(monkeypatch, lambda: sys.exit(3))
    assert find_diagnostics(("slime",))[0].reason == "it cannot be looked at: SystemExit: 3"


def test_all_integrations_are_looked_at(capsys: Any) -> None:
    code, report = doctor(capsys)
    assert code == 0
    assert {each["name"] for each in report["integrations"]} == set(INTEGRATIONS)
    assert all(f["state"] != "refused" or (f["reason"] and f["remedy"]) for f in report["integrations"])


def test_the_kernels_of_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(environment, "verdict", lambda device: pytest.fail("looked for a GPU"))
    kernels = find_kernels()
    assert (kernels.name, kernels.state) == ("Triton kernels", "off")
    assert "Triton kernels run on CUDA only" in kernels.reason
    monkeypatch.setenv("COMPACT_LOGITS", "strict")
    stand_in(monkeypatch, lambda: [Diagnostic("slime", "on")])
    code, report = doctor(capsys, "slime")
    assert code == 0 and report["kernels"]["state"] == "off"
    assert main(["doctor", "slime"]) == 0
    assert "Triton kernels run on CUDA only" in " ".join(capsys.readouterr().out.replace("│", "").split())


@pytest.mark.parametrize(
    ("verdict", "mode", "state", "code"),
    [
        (Verdict(True, "errors on a card"), "strict", "on", 0),
        (Verdict(False, "OutOfResources: shared memory"), "1", "refused", 0),
        (Verdict(False, "OutOfResources: shared memory"), "strict", "refused", 1),
    ],
)
def test_the_verdict_of_the_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, verdict: Verdict, mode: str, state: str, code: int
) -> None:
    devices = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(environment, "verdict", lambda device: devices.append(device) or verdict)
    monkeypatch.setenv("COMPACT_LOGITS", mode)
    stand_in(monkeypatch, lambda: [Diagnostic("slime", "on")])
    found, report = doctor(capsys, "slime")
    assert found == code and report["refused"] is bool(code)
    assert devices == [torch.device("cuda", 3)]
    assert report["kernels"]["state"] == state and report["kernels"]["reason"] == verdict.reason
    assert bool(report["kernels"]["remedy"]) == (state == "refused")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["megatron"], "needed integrations among slime, megatron_rl, verl, torchforge, got 'megatron'"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--slime"], "argument --slime: expected one argument"),
    ],
)
def test_wrong_use_ends_with_2_and_one_line(capsys: Any, arguments: list[str], said: str) -> None:
    assert main(["doctor", *arguments]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    (line,) = streams.err.splitlines()
    assert line.startswith("compact-logits doctor: ") and said in line


def test_without_rich_it_says_so_and_json_still_works(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "rich" else find_spec(name, *a))
    assert main(["doctor", "slime"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'compact-logits[cli]', or pass --json" in line
    code, report = doctor(capsys, "slime")
    assert code == 0
    assert next(version for version in report["versions"] if version["name"] == "rich")["version"] is None


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"rich", "matplotlib", "megatron"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from compact_logits.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_with_neither_megatron_nor_the_extra_there_is_no_traceback() -> None:
    environ = {**os.environ, "COMPACT_LOGITS": "1"}
    call = [sys.executable, "-c", WITHOUT, "doctor", "--json", "--slime", "--kl-coef 0"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=250, env=environ)
    assert "Traceback" not in done.stderr and done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["seam"]["kind"] == "none" and "No module named 'megatron" in report["seam"]["reason"]
    assert report["slime_recipe"]["verdict"] == "compact"
