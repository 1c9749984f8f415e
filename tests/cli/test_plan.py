"""The plan: its numbers against sizes worked out by hand, what fits a card, its errors, its picture."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from compact_logits.cli import main
from compact_logits.cli.planning import make_plan
from compact_logits.cli.rollouts import SHIPPED, read_rollouts
from compact_logits.memory import HeadSize, simulate
from tests.support.pictures import is_picture

SMALL = ("--vocab", "16000", "--hidden", "64", "--chunk-bytes", "1MiB")
COARSE = ("--chunk-bytes", "256MiB")  # fewer chunks are faster to simulate


def plan(capsys: Any, *arguments: str) -> dict[str, Any]:
    code = main(["plan", "--json", *arguments])
    streams = capsys.readouterr()
    assert code == 0 and not streams.err, streams.err
    report: dict[str, Any] = json.loads(streams.out)
    return report


def test_the_full_path_holds_two_fp32_logits_and_the_compact_path_a_chunk(capsys: Any) -> None:
    report = plan(capsys, *SMALL, "--tokens", "4096", "--density", "0.1")
    assert report["model"]["padded_vocab"] == 16000
    logits = 4096 * 16000 * 4
    full, compact = report["full_path"], report["compact_path"]
    assert full["rows"] == compact["rows"] == 4096 and compact["kept_rows"] == 410
    assert full["forward_bytes"] == pytest.approx(2 * logits, rel=0.01)
    assert full["saved_bytes"] == pytest.approx(logits, rel=0.01)
    # Kept rows, the gradient of the hidden states, and no more logits than the budget.
    hidden = (410 + 4096) * 64 * 2
    assert compact["peak_bytes"] <= 2**20 + 3 * hidden
    assert not dist.is_initialized()


def test_by_default_logits_take_what_a_gpu_may_hold(capsys: Any) -> None:
    head = ("--preset", "qwen3.5-9b", "--tp", "4", "--tokens", "32768", "--kept", "6554")
    report, small = (plan(capsys, *head, *more) for more in ((), ("--chunk-bytes", "256MiB")))
    assert report["setup"]["chunk_bytes"] == 2**30 and small["setup"]["chunk_bytes"] == 2**28
    logits = 6554 * 62080 * 2
    assert report["logits"] == {"bytes": logits, "slices": 1, "saved_slices": 1}
    assert logits < report["compact_path"]["saved_bytes"] < 1.1 * logits
    assert small["logits"]["slices"] > small["logits"]["saved_slices"] > 0
    assert small["logits"]["bytes"] <= 2**28
    assert main(["plan", *head]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for said in (
        "logits of the compact path: 0.76 GiB at a time; slices of the vocabulary: 1, saved for backward: 1",
        "their budget: 1.00 GiB (the default on a GPU; COMPACT_LOGITS_CHUNK_BYTES sets it for the frameworks)",
        "saved logits are in memory until backward: under pipeline parallelism of every micro-batch in flight",
    ):
        assert said in printed


def test_megatrons_and_slimes_padding(capsys: Any) -> None:
    report = plan(
        capsys, "--vocab", "1001", "--hidden", "64", "--tp", "2", "--cp", "2", "--tokens", "1000", "--kept", "3"
    )
    assert report["model"]["padded_vocab"] == 1024
    assert report["full_path"]["rows"] == 512 and report["compact_path"]["kept_rows"] == 2
    assert report["setup"]["sequence_parallel"] is True
    report = plan(capsys, "--preset", "glm5-744b-a40b", "--tp", "8", "--tokens", "1024", "--vocab", "154900")
    assert report["model"]["padded_vocab"] == 155008 and report["model"]["vocab"] == 154900
    assert report["model"]["source"].endswith("glm5-744B-A40B.sh, but for vocab")


@pytest.mark.parametrize(
    ("more", "path", "moment"),
    [
        (["--entropy", "loss"], "full_path", "saved_bytes"),
        (["--nucleus-ids", "20"], "full_path", "forward_bytes"),
        (["--top-k", "32"], "full_path", "forward_bytes"),
        (["--no-fused"], "compact_path", "backward_bytes"),
        (["--hidden", "1024"], "compact_path", "saved_bytes"),
        (["--hidden", "512"], "compact_path", "backward_bytes"),
        (["--chunk-bytes", "4MiB"], "compact_path", "forward_bytes"),
    ],
    ids=str,
)
def test_what_takes_more_memory(capsys: Any, more: list[str], path: str, moment: str) -> None:
    plain, changed = (plan(capsys, *SMALL, "--tokens", "2048", *each) for each in ([], more))
    assert changed[path][moment] > 1.2 * plain[path][moment]


def test_what_fits_a_card(capsys: Any) -> None:
    report = plan(capsys, *SMALL, "--tokens", "4096", "--cp", "2", "--memory", "512MiB", "--reserved", "312MiB")
    assert report["card"] == {"memory_bytes": 2**29, "reserved_bytes": 312 * 2**20, "free_bytes": 200 * 2**20}
    full, compact = report["full_path"], report["compact_path"]
    assert full["fits"] is False and compact["fits"] is True
    assert full["largest_micro_batch_tokens"] < 4096 < compact["largest_micro_batch_tokens"]
    for name, given in (("full", full), ("compact", compact)):
        rows = given["largest_micro_batch_tokens"] // 2
        size = HeadSize(4096, round(4096 * 410 / 2048), 16000, 64, entropy="metric", fused=True, chunk_bytes=2**20)
        bytes_ = simulate(size.of_rows(rows), name).peak  # type: ignore[arg-type]
        assert 0.97 * 200 * 2**20 < bytes_ <= 200 * 2**20, name


def test_the_masks_of_a_file_are_used(capsys: Any) -> None:
    arguments = ("--rollouts", str(SHIPPED), "--micro-batch-tokens", "4096", "--cp", "2", "--tp", "2")
    report = plan(capsys, *SMALL, *COARSE, *arguments)
    rollouts = read_rollouts(SHIPPED, vocab=16000)
    found = report["rollouts"]
    assert found["tokens"] == sum(len(rollout.tokens) for rollout in rollouts)
    assert (
        found["kept"] == sum(sum(rollout.loss_mask) for rollout in rollouts) == sum(r["kept"] for r in found["ranks"])
    )
    assert found["micro_batches"] == len({rank["micro_batch"] for rank in found["ranks"]}) > 3
    assert report["full_path"]["rows"] == max(rank["rows"] for rank in found["ranks"])
    # The rank that takes most: no other one has more rows kept and a fuller shard.
    worst = report["compact_path"]["peak_bytes"]
    base = HeadSize(2, 0, 16128, 64, tp=2, entropy="metric", fused=True, chunk_bytes=2**28)
    for rank in found["ranks"]:
        size = HeadSize(
            **{**vars(base), "rows": rank["rows"], "kept": rank["kept"], "most_on_shard": max(rank["kept_of_shards"])}
        )
        assert simulate(size, "compact").peak <= worst
    contiguous = plan(capsys, *SMALL, *COARSE, *arguments, "--allgather-cp")
    assert contiguous["rollouts"]["kept"] == found["kept"]
    assert contiguous["rollouts"]["ranks"] != found["ranks"]
    of_batches = [
        [rank["kept"] for rank in found["ranks"] if rank["micro_batch"] == number]
        for number in range(found["micro_batches"])
    ]
    assert found["critical_rows"] == sum(map(max, of_batches)) >= found["critical_rows_balanced"] >= found["kept"] / 2
    # Cut at the end of one response after another, contiguous slices are far from even.
    assert contiguous["rollouts"]["critical_rows_balanced"] < contiguous["rollouts"]["critical_rows"]


def test_the_busiest_rank_is_told_before_and_after(capsys: Any) -> None:
    assert main(["plan", *SMALL, *COARSE, "--rollouts", str(SHIPPED), "--micro-batch-tokens", "8192", "--cp", "4"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    match = re.search(
        r"busiest CP rank projects, over all micro-batches: ([\d,]+); with .*BALANCE=1: ([\d,]+)", printed
    )
    assert match is not None
    assert int(match[1].replace(",", "")) > int(match[2].replace(",", "")) > 0


def test_a_plan_of_many_ranks_is_that_of_the_worst() -> None:
    head = HeadSize(rows=512, kept=100, vocab=6400, hidden=64, chunk_bytes=2**20)
    found = make_plan(head, free_bytes=None)
    assert found.full.bytes == simulate(head, "full") and found.compact.bytes == simulate(head, "compact")
    assert found.fits(found.full) is None


def test_the_tables_say_it(capsys: Any) -> None:
    arguments = ("--vocab", "16001", "--hidden", "64", "--tied", "--rollouts", str(SHIPPED), "--memory", "1GiB")
    assert main(["plan", *arguments]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for said in (
        "24 rollouts of 24,353 tokens, 22.7% kept, in 1 micro-batches",
        "a model: vocabulary 16,001 (padded: 16,128), hidden 64; TP 1, CP 1",
        "peak of the head",
        "largest micro-batch, tokens",
        "(the embedding's, tied)",
        "of 1.00 GiB is reserved: nothing",
    ):
        assert said in printed


def test_the_picture(capsys: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert main(["plan", *SMALL, *COARSE, "--tokens", "1024", "--memory", "1GiB", "--plot", str(path)]) == 0
    assert f"drawn into {path}" in capsys.readouterr().out.replace("\n", "")
    assert is_picture(path)
    # Without a card, and where no row is kept.
    path = tmp_path / "nothing.png"
    assert main(["plan", *SMALL, *COARSE, "--tokens", "1024", "--kept", "0", "--plot", str(path)]) == 0
    assert is_picture(path)


WRONG = [
    ([], "needed --preset NAME, or --vocab and --hidden"),
    (["--vocab", "100"], "needed --preset NAME, or --vocab and --hidden"),
    (["--preset", "gpt-2"], "--preset must be one of"),
    ([*SMALL, "--tp", "0"], "--tp must be from 1 to 256, got 0"),
    ([*SMALL, "--vocab", "-5"], "--vocab must be from 1 to"),
    ([*SMALL, "--tokens", "99999999999"], "--tokens must be from 1 to 16777216"),
    ([*SMALL, "--tokens", "many"], "argument --tokens: invalid int value"),
    ([*SMALL, "--density", "1.5"], "--density must be from 0 to 1, got 1.5"),
    ([*SMALL, "--density", "nan"], "--density must be from 0 to 1, got nan"),
    ([*SMALL, "--temperature", "0"], "--temperature must be positive and finite, got 0.0"),
    ([*SMALL, "--temperature", "inf"], "--temperature must be positive and finite, got inf"),
    ([*SMALL, "--kept", "5", "--density", "0.1"], "--kept and --density exclude each other; give one of them"),
    ([*SMALL, "--kept", "5000", "--tokens", "4096"], "--kept must be at most --tokens 4096, got 5000"),
    ([*SMALL, "--rollouts", str(SHIPPED), "--tokens", "5"], "--rollouts and --tokens exclude each other"),
    ([*SMALL, "--micro-batch-tokens", "5"], "--micro-batch-tokens says how --rollouts are packed"),
    ([*SMALL, "--nucleus-ids", "5", "--top-k", "5"], "--nucleus-ids and --top-k exclude each other; give one of them"),
    ([*SMALL, "--memory", "80GB"], "--memory: a byte count must be a positive whole number"),
    ([*SMALL, "--memory", "1GiB", "--reserved", "1GiB"], "--reserved must be less than --memory 1GiB, got 1GiB"),
    ([*SMALL, "--reserved", "1GiB"], "--reserved is part of --memory"),
    ([*SMALL, "--chunk-bytes", "0"], "--chunk-bytes: a byte count must be a positive whole number"),
    ([*SMALL, "--plot", "x.jpg"], "--plot must name a .png file"),
    ([*SMALL, "--plot", "/no/such/folder/x.png"], "--plot must name a file in a folder that exists"),
    ([*SMALL, "--rollouts", "/no/such/file"], "got /no/such/file: No such file or directory"),
    (["--vocab", "64", "--hidden", "8", "--vocab-multiple", "1", "--top-k", "100"], "0 <= top_k <= vocab / tp"),
    (["--vocab", "512", "--hidden", "8", "--rollouts", "/dev/zero"], "needed a line of at most"),
    (["--vocab", "200", "--hidden", "8", "--rollouts", str(SHIPPED)], "below the vocabulary size 200"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=range(len(WRONG)))
def test_wrong_use_ends_with_2_and_one_line(capsys: Any, arguments: list[str], said: str) -> None:
    assert main(["plan", *arguments]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    (line,) = streams.err.splitlines()
    assert line.startswith("compact-logits plan: ") and said in line


@pytest.mark.parametrize(
    ("missing", "arguments", "said"),
    [
        ("rich", [], "the plan prints with rich, which is not installed: pip install 'compact-logits[cli]'"),
        ("matplotlib", ["--json", "--plot", "x.png"], "--plot draws with matplotlib, which is not installed"),
    ],
)
def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, missing: str, arguments: list[str], said: str
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == missing else find_spec(name, *a))
    assert main(["plan", *SMALL, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
