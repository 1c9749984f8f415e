"""What the engine does on a GPU, on fake CUDA tensors: how often it launches, what it reads and writes, where it waits.

Beside the products, a logit is read once in forward, and read and written once in backward, whatever the scorer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

import compact_logits as cl
from compact_logits import VocabShard
from compact_logits.engine.kernels import torch_kernels
from compact_logits.engine.linear import score_hidden
from compact_logits.scorers import log_prob_scorer, top_p
from tests.support.device_work import DeviceWork, HostWait, backward, fake_cuda

if not torch.backends.cuda.is_built():
    pytest.skip("needs a CUDA build of torch", allow_module_level=True)

ROWS, HIDDEN, VOCAB = 6554, 4096, 62080
ONE_SLICE, SLICES = None, 512 * 2**20  # bytes: all logits are 776 MiB

Outputs = list[Tensor]


def head(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.empty(ROWS, HIDDEN, dtype=dtype, device="cuda", requires_grad=True)
    weight = torch.empty(VOCAB, HIDDEN, dtype=dtype, device="cuda", requires_grad=True)
    return hidden, weight, torch.empty(ROWS, dtype=torch.int64, device="cuda")


def log_probs(chunk_bytes: int | None = None, temperature: Any = 1.0, **options: Any) -> Outputs:
    if temperature == "of rows":
        temperature = torch.empty(ROWS, device="cuda")
    stats = cl.linear_log_probs(*head(), chunk_bytes=chunk_bytes, temperature=temperature, check_ranks=False, **options)
    return [each for each in (stats.log_probs, stats.entropy) if each is not None and each.requires_grad]


def topk_kl(chunk_bytes: int | None = None, k: int = 32, **options: Any) -> Outputs:
    hidden, weight, _ = head()
    teacher = torch.empty(ROWS, k, device="cuda"), torch.empty(ROWS, k, dtype=torch.int64, device="cuda")
    return [cl.linear_topk_kl(hidden, weight, *teacher, chunk_bytes=chunk_bytes, check_ranks=False, **options).loss]


class Most(NamedTuple):
    """Of launches beside the products, in each direction, and of bytes a logit."""

    a_slice: int
    a_microbatch: int
    bytes_forward: float
    bytes_backward: float


FEW = Most(a_slice=12, a_microbatch=40, bytes_forward=3.0, bytes_backward=6.0)
# The student's own top k is one more read. What is computed of k numbers a row is many small launches, and most for the
# tail, which has nine outputs and finds the ids that are listed twice.
TOPK = Most(a_slice=30, a_microbatch=40, bytes_forward=5.0, bytes_backward=6.0)
TAIL = TOPK._replace(a_microbatch=75)

CASES: dict[str, tuple[Callable[..., Outputs], dict[str, Any], Most]] = {
    "log-prob": (log_probs, {}, FEW),
    "temperature": (log_probs, {"temperature": 0.7}, FEW),
    "temperature of each row": (log_probs, {"temperature": "of rows"}, FEW),
    "entropy metric": (log_probs, {"entropy": "metric"}, FEW),
    "entropy loss": (log_probs, {"entropy": "loss"}, FEW),
    "sum_p2": (log_probs, {"sum_p2": True}, FEW),
    "all of these": (
        log_probs,
        {"entropy": "loss", "sum_p2": True, "temperature": "of rows", "vocab_size": 62079},
        FEW,
    ),
    "top-k KL": (topk_kl, {}, TOPK),
    "top-k KL, clamped": (topk_kl, {"log_prob_min_clamp": -10.0}, TOPK),
    "top-k KL, tail": (topk_kl, {"tail": True}, TAIL),
}


def measured(name: str, chunk_bytes: int | None) -> DeviceWork:
    call, options, _ = CASES[name]
    with fake_cuda() as work:
        outputs = call(chunk_bytes, **options)
        work.stage = "backward"
        backward(*outputs)
    return work


def assert_within(work: DeviceWork, most: Most, slices: int) -> None:
    for stage, most_bytes in (("forward", most.bytes_forward), ("backward", most.bytes_backward)):
        launches, allowed = len(work.others(stage)), most.a_slice * slices + most.a_microbatch
        assert launches <= allowed, f"{stage}: {launches} launches beside the products, at most {allowed}"
        of_a_logit = work.bytes(stage) / (ROWS * VOCAB)
        assert of_a_logit <= most_bytes, f"{stage}: {of_a_logit:.2f} bytes a logit, at most {most_bytes}"


@pytest.mark.parametrize(("chunk_bytes", "slices"), [(ONE_SLICE, 1), (SLICES, 4)])
@pytest.mark.parametrize("name", CASES)
def test_launches_and_bytes_of_a_microbatch(name: str, chunk_bytes: int | None, slices: int) -> None:
    work = measured(name, chunk_bytes)
    names = [launch.name for launch in work.launches]
    assert names.count("compact_logits::softmax_grad_") == slices
    kept = slices if chunk_bytes is None else 1
    assert sum(launch.is_product for launch in work.launches) == slices * 3 + slices - kept
    assert_within(work, CASES[name][2], slices)


def one_more_read(logits: Tensor) -> None:
    logits.amax(dim=1)


def a_loop_over_blocks_of_rows(logits: Tensor) -> None:
    for block in logits[:, :1].split(100):
        block.mul(2)


@pytest.mark.parametrize(
    ("extra", "found"),
    [(one_more_read, "forward: 4.0. bytes a logit"), (a_loop_over_blocks_of_rows, "forward: 9. launches")],
)
def test_a_scorer_that_does_more_is_found(
    extra: Callable[[Tensor], None], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_each_slice(monkeypatch, extra)
    with pytest.raises(AssertionError, match=found):
        assert_within(measured("log-prob", ONE_SLICE), FEW, 1)


def in_each_slice(monkeypatch: pytest.MonkeyPatch, extra: Callable[[Tensor], Any]) -> None:
    right = log_prob_scorer.LogProbScorer.add_slice_

    def changed(self: Any, stats: Any, logits: Tensor, first: int) -> None:
        extra(logits)
        right(self, stats, logits, first)

    monkeypatch.setattr(log_prob_scorer.LogProbScorer, "add_slice_", changed)


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda logits: logits[0, 0].item(),
    "a condition": lambda logits: bool(logits[0, 0] > 0),
    "tolist": lambda logits: logits[0].tolist(),
    "cpu": lambda logits: logits[:, 0].cpu(),
    "to the host, not awaited": lambda logits: logits[:, 0].to("cpu", non_blocking=True),
    "nonzero": lambda logits: logits[:, 0].nonzero(),
    "a boolean index": lambda logits: logits[:, 0][logits[:, 0] > 0],
    "a boolean index written to": lambda logits: logits[:, 0].index_put_((logits[:, 0] > 0,), logits[:, 0]),
    "masked_select": lambda logits: logits.masked_select(logits > 0),
    "unique": lambda logits: logits[:, 0].unique(),
    "equal": lambda logits: torch.equal(logits, logits),
    "numbers from the host": lambda logits: torch.arange(4, device="cpu").to(logits.device),
    "a list from the host": lambda logits: torch.tensor([1, 2], device=logits.device),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_for_the_device_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_each_slice(monkeypatch, WAITS[name])
    with fake_cuda(), pytest.raises(HostWait):
        log_probs()


# What follows runs under `fake_cuda`, where a wait raises.


def given_logits(positions: int = 100, **options: Any) -> Outputs:
    logits = torch.empty(4, positions, VOCAB, dtype=torch.bfloat16, device="cuda", requires_grad=True)[:, :100]
    stats = cl.log_probs(logits, torch.empty(4, 100, dtype=torch.int64, device="cuda"), entropy="loss", **options)
    assert stats.entropy is not None
    return [stats.log_probs, stats.entropy]


def given_logits_topk(**options: Any) -> Outputs:
    logits = torch.empty(400, VOCAB, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    ids = torch.empty(400, 8, dtype=torch.int64, device="cuda")
    return [cl.topk_kl(logits, torch.empty(400, 8, device="cuda"), ids, **options).loss]


def with_bias() -> Outputs:
    hidden, weight, targets = head()
    bias = torch.empty(VOCAB, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    return [cl.linear_log_probs(hidden, weight, targets, bias=bias).log_probs]


def under_autocast() -> Outputs:
    torch.set_autocast_enabled("cuda", True)
    try:
        outputs = [cl.linear_log_probs(*head(torch.float32)).log_probs]
    finally:
        torch.set_autocast_enabled("cuda", False)
    return outputs


def top_p_replay() -> Outputs:
    hidden, weight, targets = head()
    base = log_prob_scorer.LogProbScorer(targets, VocabShard(0, VOCAB), torch.empty(ROWS, device="cuda"), "loss")
    scorer = top_p.TopPScorer(base, top_p.TopPMask(*[torch.empty(0)] * 3))
    with unset_fake_temporarily():
        host_ids = torch.arange(0, VOCAB, 10, device="cpu")
    count = len(host_ids)
    on_device = torch.empty(2, count, dtype=torch.int64, device="cuda")
    flags = torch.empty(count, dtype=torch.bool, device="cuda"), torch.empty(ROWS, dtype=torch.bool, device="cuda")
    vars(scorer)["_entries"] = top_p._Entries(*on_device, *flags, host_ids)
    return list(score_hidden(hidden, weight, None, scorer, chunk_bytes=SLICES)[:2])


@pytest.fixture
def host_ids_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one list that top-p replay has on the host is read there."""
    right = top_p._Entries.run

    def run(self: Any, first: int, columns: int) -> slice:
        with unset_fake_temporarily():
            return right(self, first, columns)

    monkeypatch.setattr(top_p._Entries, "run", run)


CALLS: dict[str, Callable[[], Outputs]] = {
    "bias": with_bias,
    "autocast": under_autocast,
    "fp32 logits": lambda: log_probs(fp32_logits=True),
    "fp32 logits, slices": lambda: log_probs(SLICES, fp32_logits=True),
    "given logits": given_logits,
    "given logits, sequences that no view joins": lambda: given_logits(positions=101, vocab_size=VOCAB - 3),
    "top-k KL of given logits": given_logits_topk,
    "top-k KL of given logits, tail": lambda: given_logits_topk(tail=True),
    "top-k KL of given logits, in place": lambda: given_logits_topk(inplace_backward=True),
    "top-p": top_p_replay,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("host_ids_are_numbers")
def test_nothing_waits_for_the_device(name: str) -> None:
    with fake_cuda() as work:
        outputs = CALLS[name]()
        work.stage = "backward"
        backward(*outputs)
    names = {launch.name for launch in work.launches}
    assert {"compact_logits::row_stats_", "compact_logits::softmax_grad_"} <= names


@pytest.fixture
def group_of_two() -> Iterator[Any]:
    """A group whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("call", [log_probs, topk_kl])
def test_nothing_waits_for_the_device_where_the_vocabulary_is_sharded(
    call: Callable[..., Outputs], group_of_two: Any
) -> None:
    with fake_cuda() as work:
        backward(*call(SLICES, shard=VocabShard(VOCAB, 2 * VOCAB, group_of_two)))
    names = [launch.name for launch in work.launches]
    assert [name for name in names if name.startswith("c10d::")]


def test_the_torch_kernels_walk_over_larger_blocks_on_a_gpu() -> None:
    with fake_cuda() as work:
        logits = torch.empty(ROWS, VOCAB, dtype=torch.bfloat16, device="cuda")
        numbers = torch.empty(ROWS, device="cuda")
        torch_kernels.softmax_grad_(logits, numbers, numbers, numbers, numbers)
        blocks = [launch for launch in work.launches if launch.name == "aten::exp_"]
    rows_of_64_mib = 64 * 2**20 // (4 * VOCAB)
    assert len(blocks) == -(-ROWS // rows_of_64_mib)
