"""torchforge's bench: the gate comes before the numbers, and the simulated case counts this rank's bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compact_logits.cli import torchforge_bench, torchforge_paths
from compact_logits.cli.launch import RankFailed
from compact_logits.cli.torchforge_rank import Measured, Sizes, bench_rank
from compact_logits.cli.torchforge_seed import SEED_CASE, simulate_ways
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

SMALL = Sizes(
    batch=2,
    prompt=2,
    response=6,
    vocab=40,
    hidden=8,
    dtype=torch.float32,
    temperature=0.8,
    rounds=1,
    training=True,
)


def bench(rank: int, world: int, folder: str, spoilt: bool) -> list[Measured]:
    torch.distributed.destroy_process_group()
    if spoilt:
        ours = torchforge_paths.compute_logprobs_from_hidden

        def off_by_a_little(*args: Tensor, **kwargs: bool) -> Tensor:
            return ours(*args, **kwargs) * (1 + 1e-3)

        torchforge_paths.compute_logprobs_from_hidden = off_by_a_little
    return bench_rank(rank, world, f"file://{folder}/rendezvous", lambda: None, SMALL, "", False)


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_way_that_fails_the_gate_has_no_numbers(tmp_path: Path, spoilt: bool) -> None:
    for found in run_ranks(2, bench, str(tmp_path), spoilt, timeout=300):
        assert [each.name.split()[0] for each in found] == ["full_tensor", "loss_parallel", "ours", "ours"]
        for each in found[: 3 if spoilt else 4]:
            assert not each.failure and max(each.errors) <= 1e-5 and each.time_ms > 0 and len(each.errors) == 3
        if spoilt:
            assert "off by" in found[3].failure and found[3].time_ms == 0 and found[3].peak_mib == 0


def test_the_simulated_case_of_the_issue() -> None:
    """Batch 4, 9k tokens, V of 150k, TP 2: the counts that a rank's shapes give, and ours from hidden within 1 GB."""
    gathered, parallel, ours, hidden = simulate_ways(SEED_CASE, 2, "")
    logits = 4 * 9216 * (151_936 // 2) * 2
    assert logits < ours.forward < 1.05 * logits
    assert gathered.forward > 8 * logits and logits * 5 < parallel.forward < gathered.forward
    assert hidden.forward < 1e9
    assert ours.training < 2.05 * logits and hidden.training < 2e9


def test_simulated_bytes_follow_the_ranks() -> None:
    by_ranks = [simulate_ways(replace(SEED_CASE, batch=1, response=512), ranks, "")[2].forward for ranks in (2, 4)]
    assert by_ranks[0] == pytest.approx(2 * by_ranks[1], rel=0.1)


def test_the_command_prints_and_writes_the_seed_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "seed.json"
    assert torchforge_bench.main(["--seed-case", "--root", "", "--json", str(out)]) == 0
    printed, written = capsys.readouterr().out, json.loads(out.read_text())
    assert "| ours from hidden | 0.64 |" in printed and "hardware" in printed
    assert {"hardware", "torch", "commit", "date", "case", "ways"} <= written.keys()


def test_the_command_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the ranks it starts, with a checkout whose function is the definition."""
    ops = tmp_path / "src/forge/util/ops.py"
    ops.parent.mkdir(parents=True)
    ops.write_text("from compact_logits.cli.torchforge_paths import gathered_definition as compute_logprobs\n")
    out = tmp_path / "measured.json"
    sizes = ["--batch", "1", "--prompt", "2", "--response", "4", "--vocab", "40", "--hidden", "8", "--rounds", "1"]
    call = [*sizes, "--uncompiled-only", "--root", str(tmp_path), "--json", str(out)]
    assert torchforge_bench.main(call) == 0
    printed, written = capsys.readouterr().out, json.loads(out.read_text())
    assert "1 x 6 positions, 4 scored, V 40, H 8, float32, forward and backward from hidden states" in printed
    assert "torchforge's own function; hardware" in printed
    assert [way["name"].split()[0] for way in written["ways"]] == ["full_tensor", "loss_parallel", "ours", "ours"]
    assert all(not way["failure"] and way["time_ms"] > 0 for way in written["ways"])
    assert (written["case"]["ranks"], written["case"]["vocab"]) == (2, 40)


def test_of_several_ranks_the_slowest_counts_and_a_failure_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = [Measured("theirs", False, time_ms=1.0, peak_mib=9.0, errors=[0.0]), Measured("ours", False, failure="x")]
    slow = [Measured("theirs", False, time_ms=2.0, peak_mib=3.0, errors=[0.0]), Measured("ours", False, time_ms=5.0)]
    monkeypatch.setattr(torchforge_bench, "launch", lambda *_: [fast, slow])
    assert torchforge_bench.main(["--forward-only", "--root", ""]) == 1
    printed = capsys.readouterr().out
    assert "| theirs | no | 2 | 9 | 0e+00 |" in printed and "| ours | no | x | | |" in printed
    assert "forward alone" in printed

    def broken(*_: object) -> None:
        raise RankFailed("rank 1 of 2 failed: out of luck")

    monkeypatch.setattr(torchforge_bench, "launch", broken)
    assert torchforge_bench.main(["--root", ""]) == 1
    assert capsys.readouterr().err == "torchforge_bench: rank 1 of 2 failed: out of luck\n"
