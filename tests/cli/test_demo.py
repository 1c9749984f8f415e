"""The demo: that it passes, that it would notice, and what it says when it is used wrongly."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compact_logits.cli import demo, main
from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.cli.demo_rank import Job, RankOutcome, compare_paths
from compact_logits.cli.launch import RankFailed
from compact_logits.cli.microbatch import pack
from compact_logits.cli.rollouts import SHIPPED, Rollout, pack_rollouts, read_rollouts
from compact_logits.cli.training import CompactPath, Settings
from compact_logits.errors import RefusedError
from tests.support.pictures import is_picture
from tests.support.ranks import RankPool

pytestmark = pytest.mark.slow


def small_job(dtype: torch.dtype, steps: int = 2) -> Job:
    """Three shipped trajectories cut short, the failed one among them, and one with a response of one token."""
    shipped = read_rollouts(SHIPPED, vocab=512)
    short = [Rollout(r.tokens[:300], r.loss_mask[: 300 - len(r.tokens) + len(r.loss_mask)]) for r in shipped[12:15]]
    batches = pack_rollouts([*short, Rollout([3, 4, 5], [1])], token_budget=620)
    return Job(batches, vocab=1024, dtype=dtype, settings=Settings(steps=steps, chunk_bytes=2**17), hidden=32, layers=1)


def run_small(rank: int, world: int, job: Job, fault: str = "") -> RankOutcome:
    """`compare_paths` on ranks that are there already, with a fault in the compact path if one is named."""
    original = CompactPath.__call__

    def faulty(self: CompactPath, batch: Any) -> Any:
        selection = batch.selection
        if fault == "temperature":
            self._settings = dataclasses.replace(job.settings, temperature=0.802)
        if fault == "targets":
            changed = dataclasses.replace(selection, targets=(selection.targets + 1) % job.vocab)
            batch = dataclasses.replace(batch, selection=changed)
        if fault == "rows" and selection.kept:
            indices = selection.indices - 1
            batch = dataclasses.replace(
                batch, selection=dataclasses.replace(selection, indices=indices, host_indices=indices)
            )
        log_probs, entropy = original(self, batch)
        if fault == "entropy gradient":
            entropy = entropy.detach()
        if fault == "nan":
            log_probs = log_probs * torch.nan
        return log_probs, entropy

    if fault:
        CompactPath.__call__ = faulty  # type: ignore[method-assign]
    try:
        with cpu_megatron(rank, world, tp=world):
            from megatron.core import parallel_state

            group = parallel_state.get_tensor_model_parallel_group()
            return compare_paths(world, group, lambda: None, job, "some version")
    finally:
        CompactPath.__call__ = original  # type: ignore[method-assign]


def run_demo(
    monkeypatch: pytest.MonkeyPatch, pool: RankPool, job: Job, fault: str = "", options: tuple[str, ...] = ()
) -> int:
    """`main(["demo"])`, its ranks replaced by the suite's, which work on `job`."""
    monkeypatch.setattr(demo, "_job", lambda args: job)
    monkeypatch.setattr(demo, "_run_ranks", lambda world, job, advance: pool.run(world, run_small, job, fault))
    return main(["demo", *options])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_paths_agree(
    monkeypatch: pytest.MonkeyPatch, rank_pool: RankPool, capsys: Any, tp: int, dtype: torch.dtype
) -> None:
    job = small_job(dtype)
    assert run_demo(monkeypatch, rank_pool, job, options=("--json", "--tp", str(tp))) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["parity"]["passed"] is True
    assert report["rows_kept"] == sum(sum(r.loss_mask) for batch in job.batches for r in batch) > 0
    longest = max(sum(len(r.tokens) for r in batch) for batch in job.batches)
    full, compact = report["full_path"], report["compact_path"]
    assert full["largest_logits_shape"][-2] >= longest and full["largest_logits_shape"][-1] == 1024 // tp
    assert full["largest_logits_bytes"] >= longest * 1024 // tp * 4
    assert 0 < compact["largest_logits_bytes"] <= 2**17
    assert len(full["losses"]) == 2 and full["losses"][0] != full["losses"][1]
    assert full["time_ms"] > 0 and compact["time_ms"] > 0


@pytest.mark.parametrize("fault", ["temperature", "targets", "rows", "entropy gradient", "nan"])
def test_a_fault_ends_it_with_1(monkeypatch: pytest.MonkeyPatch, rank_pool: RankPool, capsys: Any, fault: str) -> None:
    assert run_demo(monkeypatch, rank_pool, small_job(torch.float32, steps=1), fault) == 1
    streams = capsys.readouterr()
    assert "PARITY FAILED: loss differs by" in streams.err
    assert "compact path" in streams.out


def test_the_picture(monkeypatch: pytest.MonkeyPatch, rank_pool: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "demo.png"
    options = ("--json", "--plot", str(path))
    assert run_demo(monkeypatch, rank_pool, small_job(torch.float32), options=options) == 0
    assert is_picture(path)


def test_json_has_no_number_that_json_has_not(
    monkeypatch: pytest.MonkeyPatch, rank_pool: RankPool, capsys: Any, tmp_path: Path
) -> None:
    options = ["--json"]
    if importlib.util.find_spec("matplotlib") is not None:
        options += ["--plot", str(tmp_path / "nan.png")]
    assert run_demo(monkeypatch, rank_pool, small_job(torch.float32, steps=1), "nan", tuple(options)) == 1
    assert all(is_picture(path) for path in map(Path, options[2:]))
    report = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert report["parity"]["passed"] is False
    assert report["parity"]["loss_difference"] is None and report["compact_path"]["losses"] == [None]


def test_a_batch_without_counted_rows_agrees(monkeypatch: pytest.MonkeyPatch, rank_pool: RankPool, capsys: Any) -> None:
    job = dataclasses.replace(small_job(torch.float32), batches=[[Rollout([1, 2, 3, 4], [0, 0])]])
    assert run_demo(monkeypatch, rank_pool, job) == 0
    assert "0.0% kept" in capsys.readouterr().out


def test_the_full_path_is_never_compared_with_itself(rank_pool: RankPool) -> None:
    rank_pool.run(1, refuse)


def refuse(rank: int, world: int) -> None:
    with cpu_megatron(rank, world, tp=1):
        model = build_gpt(tp=1)
        model.output_layer.register_forward_hook(lambda *_: None)
        batch = pack([Rollout([1, 2, 3, 4], [1, 1])], [1.0], multiple=8)
        with (
            CompactPath(model, None, Settings(steps=1)) as path,  # type: ignore[arg-type]
            pytest.raises(RefusedError, match="the compact path did not run: .*hooks.*; there is nothing to compare"),
        ):
            path(batch)


def test_the_command_as_a_user_runs_it(tmp_path: Path) -> None:
    rollouts = [{"tokens": [1, 2, 3, 4, 5, 6], "loss_mask": [1, 0, 1], "response_length": 3}] * 2
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps(rollout) for rollout in rollouts))
    command = [sys.executable, "-m", "compact_logits", "demo", "--steps", "1", "--rollouts", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "parity holds" in done.stdout
    assert "largest logits held" in done.stdout
    assert "25.0% kept" in done.stdout, "4 of 12 rows, and 4 rows of padding"
    # torch itself says this where the tools for CUDA are installed and no GPU is.
    said = [line for line in done.stderr.splitlines() if not line.startswith("No CUDA runtime is found")]
    for noise in ("Warning", "Traceback", "CUDA", "DEPRECATED"):
        assert noise not in "\n".join(said)


BAD_USE = [
    ([], "COMMAND"),
    (["demon"], "invalid choice: 'demon'"),
    (["demo", "--steps", "0"], "--steps must be from 1 to 1000, got 0"),
    (
        ["demo", "--steps", "many"],
        "argument --steps: invalid int value: 'many'; compact-logits demo --help lists what there is",
    ),
    (["demo", "--tp", "3"], "argument --tp: invalid choice: 3"),
    (["demo", "--vocab", "5"], "--vocab must be from 4096 to 1048576 and a multiple of --tp 2, got 5"),
    (["demo", "--vocab", "4097"], "a multiple of --tp 2, got 4097"),
    (["demo", "--dtype", "fp8"], "argument --dtype: invalid choice: 'fp8'"),
    (["demo", "--chunk-bytes", "1MB"], "--chunk-bytes: a byte count must be a positive whole number"),
    (["demo", "--micro-batch-tokens", "-1"], "--micro-batch-tokens must be positive, got -1"),
    (["demo", "--micro-batch-tokens", "100"], "the budget of a micro-batch, got one of"),
    (["demo", "--plot", "x.jpg"], "--plot must name a .png file, got x.jpg"),
    (["demo", "--plot", "/none/there/x.png"], "--plot must name a file in a folder that exists"),
    (["demo", "--rollouts", "/none/there"], "needed a readable JSONL file, got /none/there: No such file"),
    (["demo", "--what"], "unrecognized arguments: --what"),
]


@pytest.mark.parametrize(
    ("argv", "said"), BAD_USE, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_use_ends_with_2_and_one_line(capsys: Any, argv: list[str], said: str) -> None:
    assert main(argv) == 2
    streams = capsys.readouterr()
    assert said in streams.err
    assert streams.err.startswith("compact-logits")
    assert streams.err.count("\n") == 1 and streams.out == ""


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("rich", "the demo draws with rich, which is not installed: pip install 'compact-logits[cli]'"),
        ("megatron", "a megatron-core GPTModel, which is not installed: pip install megatron-core"),
    ],
)
def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Any, module: str, said: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find_spec(name))
    assert main(["demo"]) == 2
    assert said in capsys.readouterr().err


def raiser(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def test_a_run_that_breaks_ends_with_1(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(demo, "_run_ranks", raiser(RankFailed("rank 1 of 2 failed: out of luck")))
    assert main(["demo", "--json"]) == 1
    assert capsys.readouterr().err == "compact-logits demo: rank 1 of 2 failed: out of luck\n"


def test_an_interruption_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(demo, "_run_ranks", raiser(KeyboardInterrupt()))
    assert main(["demo", "--json"]) == 130
    assert capsys.readouterr().err == "compact-logits demo: interrupted\n"


def test_help_lists_every_command(capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "demo" in capsys.readouterr().out
