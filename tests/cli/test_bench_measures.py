"""What the bench's clocks and gauges read on a GPU, by a stand-in of torch's, and where the kernel tells nothing."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from compact_logits.cli import bench_report, bench_timing
from compact_logits.cli.bench_case import Case, Results
from compact_logits.cli.bench_gate import OURS, errors, judge
from compact_logits.cli.bench_run import run_case
from compact_logits.cli.bench_ways import Peer, log_softmax
from compact_logits.cli.torchforge_paths import ways
from tests.support.source_tree import ROOT

pytestmark = pytest.mark.slow

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class Gpu:
    """Work that takes its time and memory: the time is read by events, the memory by a level and the highest since."""

    def __init__(self) -> None:
        self.now, self.level, self.highest = 0.0, 100 * 2**20, 0
        self.said: list[str] = []

    def work(self, milliseconds: float, mib: int, kept: int) -> None:
        self.now += milliseconds
        self.highest = max(self.highest, self.level + mib * 2**20)
        self.level += kept * 2**20

    def forward(self) -> Any:
        self.work(5.0, 300, 40)
        return lambda: self.work(7.0, 200, -40)

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.now

            def elapsed_time(self, later: Event) -> float:
                assert gpu.said[-1] == "synchronize", "read before the work was over"
                return later.at - self.at

        def reset(device: torch.device) -> None:
            gpu.highest = gpu.level

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: gpu.said.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: gpu.level)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: gpu.highest)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")


def test_a_gpu_is_timed_by_its_events_and_measured_from_its_level(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    gpu.stand_in(monkeypatch)
    assert bench_timing.measure_time(gpu.forward, CUDA) == (5.0, 7.0)
    # Backward starts with the 40 MiB that forward left, and takes 200 more.
    assert bench_timing.measure_peak(gpu.forward, CUDA) == (300.0, 240.0)
    assert bench_report._hardware(CUDA) == "a card"


# In a process of its own: a large hole that others have left would be used first.
OWN_PAGES = """
import ctypes, torch
from compact_logits.cli import bench_timing

class Mallinfo(ctypes.Structure):  # glibc's; hblks: blocks with pages of their own, which go back when they are freed
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype, libc.malloc.restype = Mallinfo, ctypes.c_void_p

def own_pages():
    before = libc.mallinfo2().hblks
    block = ctypes.c_void_p(libc.malloc(20 * 2**20))
    found = libc.mallinfo2().hblks - before
    libc.free(block)
    return found

libc.free(ctypes.c_void_p(libc.malloc(30 * 2**20)))  # from now on glibc keeps blocks of this size
found = []
bench_timing.measure_peak(lambda: lambda: found.append(own_pages()), torch.device("cpu"))
print(*found, own_pages())
"""


def test_what_is_freed_is_no_longer_resident_while_a_peak_is_measured() -> None:
    command = [sys.executable, "-c", OWN_PAGES]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout
    assert told.split() == ["1", "0"], "afterwards, as glibc does by itself once so much was freed"


def test_a_kernel_that_tells_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    opened = builtins.open

    def refused(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).startswith("/proc/self"):
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", refused)
    assert bench_timing.measure_peak(lambda: lambda: ran.append("backward"), CPU) == (None, None)


def test_hardware_that_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: "flags: none\n")
    monkeypatch.setattr("platform.machine", lambda: "a machine")
    assert bench_report._hardware(CPU).startswith("a machine, ")


def test_a_way_without_what_the_truth_has_is_infinitely_off() -> None:
    truth = Results(torch.ones(2), torch.ones(2), torch.ones(2, 3), torch.ones(4, 3))
    found = errors(truth._replace(entropy=None), truth)
    assert found == {"log_probs": 0.0, "entropy": float("inf"), "d_hidden": 0.0, "d_weight": 0.0}
    assert judge(found, errors(truth, truth), OURS).startswith("entropy off by inf")


def test_the_full_path_is_slime_s_where_slime_is(capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(tokens=24, density=0.5, hidden=8, vocab=50, dtype=torch.float32, entropy="loss", device=CPU)
    every = ("none", "metric", "loss")
    peers = [Peer("slime", every, score=log_softmax), Peer("another", every, off="it is not here")]
    outcome = run_case(case, peers, [2**20], rounds=1)
    assert outcome.full_path.name == "slime"
    assert [way.name for way in outcome.ways if way.view == "full path"] == ["plain torch", "slime"]
    bench_report.print_outcome(outcome)
    assert "left out: another: it is not here" in capsys.readouterr().out


def test_torchforge_s_own_function_is_taken_from_its_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = ModuleType("forge.util.ops")
    theirs.compute_logprobs = torch.nn.Identity()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "forge.util.ops", theirs)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for _ in range(2):
        found = ways(str(tmp_path), 1.0)
        assert sys.path.count(str(tmp_path / "src")) == 1
    assert [way.compiled for way in found] == [False] * 2 + [True] * 2 + [False] * 2
