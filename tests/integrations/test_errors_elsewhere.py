"""Errors that need something around them: ranks, a file, a framework's lists. Each by its text."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from compact_logits import topk_kl
from compact_logits.cli import main, pictures, saved_rollouts
from compact_logits.cli.comparison import compare
from compact_logits.cli.cpu_model import cpu_megatron
from compact_logits.cli.saved_rollouts import read_any_rollouts
from compact_logits.engine.dtensor import VocabPlacement
from compact_logits.errors import CompactLogitsError, ConfigError, InputError, LayoutError, PatchError
from compact_logits.integrations import slime, verl
from compact_logits.integrations.slime.batch import CheckedIterator
from compact_logits.integrations.slime.replay import top_p_mask
from compact_logits.integrations.torchforge import compute_logprobs_from_hidden
from compact_logits.megatron import Request
from compact_logits.memory import HeadSize, simulate
from compact_logits.rows import RowSelection, packed
from compact_logits.scorers.top_p import TopPMask
from tests.support.ranks import RankPool
from tests.support.slime_stand_in import run_arguments, slime_stand_in


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


def promptless(mask: list[int]) -> None:
    fields = {"tokens": [torch.arange(3)], "loss_masks": [torch.tensor(mask)]}
    fields |= {"total_lengths": [3], "response_lengths": [3]}
    CheckedIterator(SimpleNamespace(get_next=lambda keys: dict(fields))).get_next([])


TOP_P = TopPMask(torch.arange(0), torch.arange(0), torch.zeros(3, dtype=torch.bool))
LAYOUT = packed([3], [2], 3)

CASES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: Request(selection(), top_p=TOP_P),
        InputError,
        "the top-p mask is of 3 rows and 2 are kept; build it for the kept rows",
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
        lambda: promptless([1, 0, 1]),
        LayoutError,
        "sample 0: the response starts at the sequence's first token, which no row predicts, but its loss mask counts "
        "it; mask it out or give the sample a prompt",
    ),
    (
        lambda: topk_kl(torch.zeros(2, 5), torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.int64)),
        InputError,
        "needed at least one teacher id a row, got k = 0",
    ),
    (
        lambda: top_p_mask([[1]], [], LAYOUT, selection()),
        LayoutError,
        "needed one recorded top-p list and one offset list for each of 1 samples, got 1 and 0",
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


def test_thread_time_is_of_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["bench", "--thread-time"]) == 2
    assert "--thread-time counts a CPU's thread; name --device cpu with it" in capsys.readouterr().err


def test_rollouts_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_any_rollouts(tmp_path / "none.pt", vocab=10)
    none = tmp_path / "none.pt"
    assert str(caught.value) == f"needed a readable file of rollouts, got {none}: No such file or directory"


def test_a_zip_file_that_says_it_holds_more_than_it_does(tmp_path: Path) -> None:
    """Two entries whose sizes are those of the whole: what a reader would allocate is not in the file."""
    path = tmp_path / "two.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\0" * 1000)
        archive.writestr("archive/version", b"3")
    whole = path.read_bytes()
    at = whole.rindex(b"PK\x01\x02", 0, whole.rindex(b"PK\x01\x02"))  # the first entry of the directory
    path.write_bytes(whole[: at + 24] + struct.pack("<I", 2**31) + whole[at + 28 :])
    with pytest.raises(InputError) as caught:
        read_any_rollouts(path, vocab=10)
    most = saved_rollouts.MAX_FILE_BYTES
    said = f"{path}: needed at most {most} bytes, all in the file, got entries of {2**31 + 1}"
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("module", "name"), [("loss", "_allgather_cp_redistribute"), ("cp_utils", "slice_log_prob_with_cp")]
)
def test_a_slime_without_a_function_that_is_used(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    monkeypatch.setenv("COMPACT_LOGITS", "1")
    with slime_stand_in(run_arguments()) as modules:
        delattr(modules[module], name)
        with pytest.raises(PatchError) as caught:
            slime.install(run_arguments())
        assert not hasattr(modules["data"].get_batch, "__wrapped__")
    said = f"slime.backends.megatron_utils.{module} has no {name}; this slime version is not supported"
    assert str(caught.value) == said


def on_two_axes(rank: int, world: int) -> list[str]:
    """Of a tensor whose placement does not say which rows it holds, and of a head inside whose module two axes are."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    strided = DTensor(
        torch.zeros(2, 3),
        DTensorSpec(
            mesh, (_StridedShard(1, split_factor=1), Replicate()), TensorMeta(torch.Size([2, 3]), (3, 1), torch.float32)
        ),
        requires_grad=False,
    )
    head = torch.nn.Linear(3, 7)
    for name, parameter in list(head.named_parameters()):
        spread = distribute_tensor(parameter.detach(), mesh, [Replicate(), Shard(0)])
        setattr(head, name, torch.nn.Parameter(spread))
    calls: list[Callable[[], Any]] = [
        lambda: VocabPlacement.of(strided, 1, (0,)),
        lambda: compute_logprobs_from_hidden(torch.zeros(1, 4, 3), head, torch.zeros(1, 2, dtype=torch.int64)),
    ]
    said = []
    for call in calls:
        with pytest.raises(InputError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_errors_of_meshes(rank_pool: RankPool) -> None:
    ((strided, two_axes),) = rank_pool.run(1, on_two_axes)
    assert ": needed Shard or Replicate on every mesh axis; a weight that FSDP2 shards is whole inside" in strided
    assert "inside its module the head's weight lies on " in two_axes and "; needed one mesh axis" in two_axes


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
