"""The Triton kernels prove themselves before they are used, and all ranks use the same ones."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from compact_logits.engine import kernels
from compact_logits.engine.kernels import torch_kernels, verify
from compact_logits.errors import RefusedError
from tests.support.ranks import RankPool

GPU = torch.device("cuda", 0)


@pytest.fixture
def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module in their place, so that Triton and a GPU need not be here."""
    module = ModuleType("compact_logits.engine.kernels.triton_kernels")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(kernels, "triton_kernels", module, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    with mock.patch.dict(verify._verdicts, clear=True):
        yield module


def compared(monkeypatch: pytest.MonkeyPatch, result: dict[str, float] | Exception) -> list[Any]:
    calls: list[Any] = []

    def compare_kernels(module: ModuleType, device: torch.device) -> dict[str, float]:
        calls.append((module, device))
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(verify, "compare_kernels", compare_kernels)
    return calls


@pytest.mark.parametrize(
    ("result", "proven", "reason"),
    [
        (
            {"row_stats float32": 0.25, "write_at float16": 1.0},
            True,
            "on H200: row_stats float32 0.25, write_at float16 1 (",
        ),
        ({"row_stats float32": 0.25, "softmax_grad bfloat16": 1.5}, False, "softmax_grad bfloat16 1.5"),
        ({"row_stats float32": float("nan")}, False, "row_stats float32 nan"),
        ({"row_stats float32": float("inf")}, False, "row_stats float32 inf"),
        (RuntimeError("ptxas: out of registers"), False, "RuntimeError: ptxas: out of registers"),
    ],
)
def test_a_verdict_is_reached_once_and_logged_once_with_its_reason(
    result: dict[str, float] | Exception,
    proven: bool,
    reason: str,
    triton_kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = compared(monkeypatch, result)
    with caplog.at_level(logging.INFO, logger="compact_logits"):
        verdicts = [kernels.verdict(GPU) for _ in range(3)]
    assert calls == [(triton_kernels, GPU)]
    assert verdicts == [verdicts[0]] * 3
    assert verdicts[0].proven is proven
    assert reason in verdicts[0].reason
    (record,) = caplog.records
    assert record.levelno == (logging.INFO if proven else logging.WARNING)
    assert verdicts[0].reason in record.getMessage()


def test_rocm_is_not_proven(triton_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = compared(monkeypatch, {"row_stats float32": 0.0})
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert kernels.verdict(GPU) == verify.Verdict(False, "ROCm is not proven")
    assert not calls


def test_without_triton_the_torch_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "compact_logits.engine.kernels.triton_kernels", None)
    monkeypatch.delattr(kernels, "triton_kernels", raising=False)
    with mock.patch.dict(verify._verdicts, clear=True):
        found = kernels.verdict(GPU)
    assert not found.proven
    assert "ImportError" in found.reason or "ModuleNotFoundError" in found.reason


def test_proven_kernels_run_on_a_gpu_and_there_alone(
    triton_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared(monkeypatch, {"row_stats float32": 0.0})
    with FakeTensorMode():
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            expected = torch_kernels if dtype == torch.float64 else triton_kernels
            assert kernels._kernels(torch.empty(2, 3, dtype=dtype, device="cuda")) is expected
            assert kernels._kernels(torch.empty(2, 3, dtype=dtype, device="cpu")) is torch_kernels
        kernels.use_torch_kernels(GPU, "those of rank 1 are not proven")
        assert kernels._kernels(torch.empty(2, 3, device="cuda")) is torch_kernels
    assert kernels.verdict(GPU) == verify.Verdict(False, "those of rank 1 are not proven")


def prove(rank: int, world: int, failing: tuple[int, ...], strict: bool) -> tuple[bool | str, bool, int]:
    """What `prove_on_all_ranks` says, or the error that it raises; whether the kernels run after it; warnings."""
    on_gpu = mock.patch.multiple(torch.cuda, is_available=lambda: True, current_device=lambda: 0)
    mine = verify.Verdict(rank not in failing, f"softmax_grad is off on rank {rank}")
    with on_gpu, mock.patch.dict(verify._verdicts, {0: mine}, clear=True):
        with mock.patch.object(verify.logger, "warning") as warning:
            try:
                said: bool | str = verify.prove_on_all_ranks(strict=strict).proven
            except RefusedError as error:
                said = str(error)
        return said, verify.verdict(GPU).proven, warning.call_count


def test_where_one_rank_fails_all_run_the_torch_kernels(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, prove, (), False) == [(True, True, 0)] * 2
    # The rank that failed has said so when it did.
    assert rank_pool.run(2, prove, (1,), False) == [(False, False, 1), (False, False, 0)]
    assert rank_pool.run(2, prove, (0, 1), False) == [(False, False, 0)] * 2


def test_strict_raises_on_every_rank(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, prove, (), True) == [(True, True, 0)] * 2
    for said, proven, _ in rank_pool.run(2, prove, (1,), True):
        assert isinstance(said, str)
        assert said.startswith("COMPACT_LOGITS=strict: the Triton kernels are not proven here: ")
        assert "softmax_grad is off on rank 1" in said
        assert not proven


def test_without_a_gpu_nothing_travels_and_nothing_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert verify.prove_on_all_ranks() == verify.Verdict(False, "Triton runs on CUDA, not on cpu")
