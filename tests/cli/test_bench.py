"""The bench: the gate comes before the numbers, what is absent is named, and the output has what a reader needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compact_logits.cli import bench_report, bench_run, main
from compact_logits.cli.bench_case import Case, Results, make_inputs, true_results
from compact_logits.cli.bench_floor import Floor
from compact_logits.cli.bench_gate import OURS, PEERS, errors, judge, results
from compact_logits.cli.bench_peers import ROOTS, find_peers
from compact_logits.cli.bench_run import make_ways, run_case
from compact_logits.cli.bench_ways import Peer, as_shipped, full_path, log_softmax, on_selected_rows, ours

pytestmark = pytest.mark.slow

CASE = Case(tokens=24, density=0.5, hidden=8, vocab=50, dtype=torch.float32, entropy="loss", device=torch.device("cpu"))
EVERY = ("none", "metric", "loss")
TINY = ["bench", "--tokens", "24", "--hidden", "8", "--vocab", "50", "--rounds", "2", "--no-peers", "--device", "cpu"]

each_entropy = pytest.mark.parametrize("entropy", EVERY)


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    """Peers may start a process group of one rank, and Megatron's groups on it."""
    yield
    if torch.distributed.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def off_by_a_little(hidden: Tensor, weight: Tensor, targets: Tensor, case: Case) -> tuple[Tensor, Tensor | None]:
    log_probs, entropy = log_softmax(hidden, weight, targets, case)
    return log_probs * (1 + 1e-3), entropy


def without_entropy_gradient(
    hidden: Tensor, weight: Tensor, targets: Tensor, case: Case
) -> tuple[Tensor, Tensor | None]:
    log_probs, entropy = log_softmax(hidden, weight, targets, case)
    return log_probs, None if entropy is None else entropy.detach()


def broken(hidden: Tensor, weight: Tensor, targets: Tensor, case: Case) -> tuple[Tensor, Tensor | None]:
    raise RuntimeError("no such\ndevice")


@each_entropy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_view_of_a_right_function_passes(dtype: torch.dtype, entropy: str) -> None:
    case = replace(CASE, dtype=dtype, entropy=entropy)
    inputs = make_inputs(case)
    truth = true_results(case, inputs)
    plain = Peer("plain", EVERY, score=log_softmax)
    of_plain = errors(results(full_path("plain", log_softmax), inputs, case), truth)
    assert of_plain.keys() == {"log_probs", "d_hidden", "d_weight"} | (set() if entropy == "none" else {"entropy"})
    for way in (as_shipped(plain, case.device), on_selected_rows(plain), ours(2**28), ours(1)):
        assert judge(errors(results(way, inputs, case), truth), of_plain, OURS) == ""


def test_a_wrong_way_has_no_numbers() -> None:
    peers = [
        Peer("wrong", EVERY, score=off_by_a_little),
        Peer("no gradient", EVERY, score=without_entropy_gradient),
        Peer("broken", EVERY, score=broken),
    ]
    outcome = run_case(CASE, peers, [2**20], rounds=1)
    by_name = {way.name: way for way in outcome.ways}
    assert by_name["wrong"].failure.startswith("log_probs off by")
    assert by_name["select + no gradient"].failure == "its entropy has no gradient"
    assert by_name["broken"].failure == "RuntimeError: no such device"
    for way in outcome.ways:
        assert bool(way.forward_times) == (not way.failure)
        assert (way.peak_mib is None) or not way.failure
    written = bench_report.as_json([outcome], 1, {})["cases"][0]["ways"]
    assert {way["name"] for way in written if "time_ms" not in way} == {way.name for way in outcome.ways if way.failure}


def test_a_gradient_that_is_truly_zero_is_measured_as_it_stands() -> None:
    truth = Results(torch.zeros(2), None, torch.zeros(2, 3), torch.ones(4, 3))
    assert errors(truth, truth) == {"log_probs": 0.0, "d_hidden": 0.0, "d_weight": 0.0}
    wrong = truth._replace(d_hidden=torch.full((2, 3), 0.5))
    assert errors(wrong, truth)["d_hidden"] == pytest.approx(0.5 * 6**0.5)
    assert (
        main(["bench", "--tokens", "4", "--hidden", "1", "--vocab", "1", "--rounds", "1", "--no-peers", "--json"]) == 0
    )


def test_ours_is_held_to_a_narrower_gate_than_peers() -> None:
    full = {"log_probs": 1e-3}
    assert judge({"log_probs": 1.5e-3}, full, PEERS) == "" and judge({"log_probs": 1.05e-3}, full, OURS) == ""
    assert judge({"log_probs": 1.5e-3}, full, OURS) == "log_probs off by 1.5e-03, 1.1e-03 allowed"
    assert judge({"log_probs": float("nan")}, full, PEERS) == "log_probs off by nan, 2.0e-03 allowed"


def test_a_wrong_path_of_ours_ends_the_command_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_run, "ours", lambda budget: on_selected_rows(Peer("ours", score=off_by_a_little)))
    assert main([*TINY, "--json"]) == 0, "the view decides: a control that is wrong is not ours"
    monkeypatch.setattr(
        bench_run, "ours", lambda budget: replace(on_selected_rows(Peer("x", score=off_by_a_little)), view="ours")
    )
    assert main(TINY) == 1
    assert "no numbers: select + x (ours): log_probs off by" in capsys.readouterr().out


@each_entropy
def test_what_a_peer_cannot_answer_is_named(entropy: str) -> None:
    peers = [
        Peer("ce", score=log_softmax),
        Peer("metric", ("none", "metric"), score=log_softmax),
        Peer("gone", off="x"),
    ]
    ways, left_out = make_ways(replace(CASE, entropy=entropy), peers, [1])
    expected = {"gone": "x"}
    if entropy != "none":
        expected["ce"] = "it has no entropy"
    if entropy == "loss":
        expected["metric"] = "it has no gradient of the entropy"
    assert left_out == expected
    assert {way.name for way in ways}.isdisjoint(left_out)


def test_absent_checkouts_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.path", ["/nowhere"])
    found = {peer.name: peer for peer in find_peers({"AREAL_ROOT": str(tmp_path)})}
    assert found["slime"].off == "SLIME_ROOT is not set" and found["slime"].score is None
    assert found["AReaL"].off.startswith("cannot be imported: ModuleNotFoundError: No module named 'areal'")
    said = [peer.off for peer in found.values()]
    assert sum(name in " ".join(said) for name in ROOTS) == len(ROOTS) - 1


def test_megatron_core_takes_part() -> None:
    peer = next(peer for peer in find_peers({}) if peer.name == "megatron-core CE")
    case = replace(CASE, entropy="none", dtype=torch.bfloat16)
    outcome = run_case(case, [peer], [2**20], rounds=1)
    assert outcome.left_out == {} and [way.failure for way in outcome.ways] == [""] * 5


def test_a_peer_that_takes_the_mask_is_given_it() -> None:
    seen = []

    def score(hidden: Tensor, weight: Tensor, targets: Tensor, case: Case) -> tuple[Tensor, Tensor | None]:
        seen.append(targets)
        return log_softmax(hidden, weight, targets.clamp(min=0), case)

    inputs = make_inputs(CASE)
    results(as_shipped(Peer("p", EVERY, masks=True, score=score), CASE.device), inputs, CASE)
    kept = (seen[0] != -100).nonzero().squeeze(1)
    assert torch.equal(kept, inputs.rows) and torch.equal(seen[0][kept], inputs.targets[kept])
    selecting = Peer("p", EVERY, selects=("cpu",), score=score)
    results(as_shipped(selecting, CASE.device), inputs, CASE)
    assert torch.equal(seen[1], inputs.targets[inputs.rows])


@pytest.mark.parametrize("recompute", [False, True])
def test_the_floor_is_the_products_in_parts_too(monkeypatch: pytest.MonkeyPatch, recompute: bool) -> None:
    monkeypatch.setattr("compact_logits.cli.bench_floor._MOST_BYTES", 5 * 50 * 4 if recompute else 2**20)
    inputs = make_inputs(CASE)
    floor = Floor(CASE, inputs)
    floor.forward()
    floor.backward(recompute=recompute)
    rows = inputs.hidden[inputs.rows]
    logits = rows @ inputs.weight.T
    torch.testing.assert_close(floor._d_rows, logits @ inputs.weight)
    torch.testing.assert_close(floor._d_weight, logits.T @ rows)


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert main([*TINY, "--json", "--thread-time", "--density", "0.25", "1", "--budget", "1MiB"]) == 0
    finally:
        torch.set_num_threads(threads)
    written = json.loads(capsys.readouterr().out)
    assert {"hardware", "python", "torch", "commit", "date", "megatron-core", "rounds"} <= written.keys() and written[
        "clock"
    ] == "one thread's CPU time"
    assert [(case["kept"], case["full_path"]) for case in written["cases"]] == [(6, "plain torch"), (24, "plain torch")]
    ways = written["cases"][0]["ways"]
    assert [(way["name"], way["view"]) for way in ways] == [
        ("plain torch", "full path"),
        ("compact-logits, 1 MiB", "ours"),
        ("select + plain torch", "rows selected"),
        ("three products of the kept rows", "floor"),
        ("four products of the kept rows", "floor"),
    ]
    for way in ways:
        assert way["time_ms"] > 0 and len(way["times_ms"]) == 2
        assert (way["view"] == "floor") == (way["errors"] == {})


def test_the_command_prints_a_table_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "bench.png"
    assert main([*TINY, "--density", "0.25", "1", "--plot", str(picture), "--entropy", "loss"]) == 0
    printed = capsys.readouterr().out
    assert "6 of 24 rows (25%), vocabulary 50" in printed and "medians of 2 rounds; hardware" in printed
    assert "select + plain torch" in printed and "compact-logits, 8 MiB" in printed
    assert picture.read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--density", "0"], "--density must be above 0 and at most 1, got 0"),
        (["--tokens", "0"], "--tokens must be from 1 to 16777216, got 0"),
        (["--thread-time", "--threads", "2"], "--thread-time counts one thread, got --threads 2"),
        (["--threads", "0"], "--threads must be from 1 to 1024, got 0"),
        (["--budget", "much"], "--budget: a byte count must be"),
        (["--plot", "bench.svg"], "--plot must name a .png file, got bench.svg"),
        (["--dtype", "fp8"], "invalid choice: 'fp8'"),
    ],
)
def test_bad_use_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, *options]) == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("compact-logits bench: ") and said.count("\n") == 1


@pytest.mark.parametrize("library", ["rich", "matplotlib"])
def test_a_missing_library_is_one_line(
    library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == library else object())
    assert main([*TINY, "--plot", str(tmp_path / "a.png")]) == 2
    assert f"with {library}, which is not installed: pip install 'compact-logits[cli]'" in capsys.readouterr().err
