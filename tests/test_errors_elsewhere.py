"""Errors that need something around them: ranks, a file, a framework's lists. Each by its text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from compact_logits.cli import main, pictures
from compact_logits.cli.comparison import compare
from compact_logits.cli.cpu_model import cpu_megatron
from compact_logits.dtensor import VocabPlacement
from compact_logits.errors import CompactLogitsError, ConfigError, InputError, LayoutError
from compact_logits.integrations import verl
from compact_logits.integrations.slime.batch import CheckedIterator
from compact_logits.integrations.slime.replay import nucleus_of
from compact_logits.layouts import packed
from compact_logits.megatron import Request
from compact_logits.memory import HeadSize, simulate
from compact_logits.rows import RowSelection
from compact_logits.scorers.nucleus import Nucleus
from tests.support.ranks import RankPool


def selection() -> RowSelection:
    return RowSelection.build(torch.tensor([True, True, False]), torch.tensor([1, 2, -1]), torch.arange(3))


def started() -> None:
    with cpu_megatron(0, 1, tp=1):
        pass


def trained(losses: list[float], *names: str) -> Any:
    return SimpleNamespace(losses=losses, gradients=[{name: torch.ones(1) for name in names} for _ in losses])


def batch_of(masks: int) -> None:
    fields = {"tokens": [torch.arange(3)] * 2, "loss_masks": [torch.ones(2)] * masks}
    fields |= {"total_lengths": [3, 3], "response_lengths": [2, 2]}
    CheckedIterator(SimpleNamespace(get_next=lambda keys: dict(fields))).get_next([])


NUCLEUS = Nucleus(torch.arange(0), torch.arange(0), torch.zeros(3, dtype=torch.bool))
LAYOUT = packed([3], [2], 3)

CASES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: Request(selection(), nucleus=NUCLEUS),
        InputError,
        "the nucleus is of 3 rows and 2 are kept; build it for the kept rows",
    ),
    (
        started,
        ConfigError,
        "there is no default process group: give init_method, or start one over gloo before",
    ),
    (
        lambda: compare(trained([1.0, 2.0], "w"), trained([1.0], "w")),
        InputError,
        "needed two trainings of the same steps, at least one, got 2 and 1",
    ),
    (
        lambda: compare(trained([1.0], "w"), trained([1.0], "w", "b")),
        InputError,
        "needed gradients of the same parameters, got {'b'} in one only",
    ),
    (
        lambda: batch_of(1),
        LayoutError,
        "the micro-batch has 2 token lists, 1 loss masks, 2 total and 2 response lengths; "
        "each sample needs one of each",
    ),
    (
        lambda: nucleus_of([[1]], [], LAYOUT, selection()),
        LayoutError,
        "needed one recorded nucleus list and one offset list for each of 1 samples, got 1 and 0",
    ),
    (
        lambda: verl.no_such_name,  # type: ignore[attr-defined]
        AttributeError,
        "module 'compact_logits.integrations.verl' has no attribute 'no_such_name'",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), CASES, ids=[text[:50] for _, _, text in CASES])
def test_the_words(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == text
    assert kind is AttributeError or isinstance(caught.value, CompactLogitsError)


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError) as caught:
        pictures.save(SimpleNamespace(savefig=full), tmp_path / "a.png")  # type: ignore[arg-type]
    assert str(caught.value) == f"--plot cannot write {tmp_path / 'a.png'}: No space left on device"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cuda"]) == 2
    assert "--device cuda needs a GPU that torch can use, and there is none" in capsys.readouterr().err


def in_ranks(rank: int, world: int) -> list[str]:
    said = []
    # Over a mesh of the first two ranks; the third is none of them.
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=True)
    calls: list[Callable[[], Any]] = [lambda: simulate(HeadSize(8, 4, 32, 8, tp=2), "compact")]
    if rank == 2:
        calls.append(lambda: VocabPlacement.of(DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(1)]), 1, (0,)))
    for call in calls:
        try:
            call()
        except InputError as error:
            said.append(str(error))
    dist.barrier()
    return said


def test_errors_among_ranks(rank_pool: RankPool) -> None:
    apart = "a simulation over several ranks needs a process without a process group; run it apart"
    first, second, third = rank_pool.run(3, in_ranks)
    assert first == second == [apart]
    assert third[0] == apart and third[1].startswith("this rank is not part of the mesh of logits, ")
    assert third[1].endswith("; call on its ranks only")
