"""`compact-logits doctor` and `plan` as a user calls them: what they say, their exit codes, and no traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compact_logits.cli import main

HEAD = ["plan", "--vocab", "2048", "--hidden", "64", "--tp", "2", "--tokens", "1024", "--chunk-bytes", "256KiB"]


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    code = main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_doctor_names_versions_and_integrations(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMPACT_LOGITS", raising=False)
    code, report = said(capsys, "doctor")
    assert code == 0 and report["refused"] is False
    versions = {each["name"]: each["version"] for each in report["versions"]}
    assert versions["torch"] and versions["megatron-core"]
    assert {"slime", "megatron_rl", "verl", "torchforge"} <= {each["name"] for each in report["integrations"]}


def test_doctor_reads_a_launch_script_without_running_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMPACT_LOGITS", raising=False)
    script = tmp_path / "run.sh"
    witness = tmp_path / "ran"
    script.write_text(
        f"touch {witness}\nARGS=(\n  --advantage-estimator ppo  # GAE\n  --kl-coef 0.1 \\\n  --use-critic\n)\n"
        "python train.py ${ARGS[@]}\n"
    )
    code, report = said(capsys, "doctor", "--slime", str(script))
    assert code == 1 and report["refused"] is True
    assert "--kl-coef" in json.dumps(report) and "generalised advantage estimation" in json.dumps(report)
    assert not witness.exists()
    script.write_text("python train.py --advantage-estimator grpo --entropy-coef 0.01\n")
    assert said(capsys, "doctor", "--slime", str(script))[0] == 0


def test_plan_compares_both_paths(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = said(capsys, *HEAD, "--density", "0.25")
    assert code == 0
    full, compact = report["full_path"], report["compact_path"]
    assert (compact["rows"], compact["kept_rows"]) == (1024, 256)
    # The full path holds at least one fp32 shard of the logits, [1024, 1024].
    assert full["peak_bytes"] >= 1024 * 1024 * 4
    assert compact["peak_bytes"] < full["peak_bytes"] / 3


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "--vocab", "-5", "--hidden", "64", "--tokens", "8"],
        ["plan", "--preset", "no-such-model", "--tokens", "8"],
        [*HEAD, "--density", "1.5"],
        [*HEAD, "--memory", "lots"],
        ["plan", "--nonsense"],
        ["doctor", "--nonsense"],
    ],
    ids=" ".join,
)
def test_bad_use_ends_with_2_and_a_sentence(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    try:
        code = main(argv)
    except SystemExit as end:  # argparse's own way
        code = end.code  # type: ignore[assignment]
    assert code == 2
    told = capsys.readouterr().err
    assert told.strip() and "Traceback" not in told


def test_hostile_rollout_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, content in {
        "truncated.jsonl": b'{"tokens": [1, 2',
        "junk.jsonl": b"\x80\x04\x95\xff\x00\xfe",
        "negative.jsonl": b'{"tokens": [1, 2, 3], "loss_mask": [1], "response_length": -1}\n',
        "longer.jsonl": b'{"tokens": [1, 2], "loss_mask": [1, 1, 1], "response_length": 3}\n',
        "beyond.jsonl": b'{"tokens": [1, 99999999], "loss_mask": [1], "response_length": 1}\n',
        "bomb.pt": b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.",
    }.items():
        path = tmp_path / name
        path.write_bytes(content)
        assert main(["plan", "--vocab", "2048", "--hidden", "64", "--rollouts", str(path)]) == 2, name
        told = capsys.readouterr().err
        assert name in told and "Traceback" not in told, told
    assert not (tmp_path / "ran").exists()
