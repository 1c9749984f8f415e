"""The comparison of what ranks were asked, where a rank does not come to it, or where there is none to be made."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from compact_logits.engine import validation
from compact_logits.memory.meta_collectives import meta_collectives
from tests.support.asked_calls import CALLS, CUTS, given, said_by, shard
from tests.support.collectives import count_collectives
from tests.support.ranks import RankPool

FUNCTIONS = ["linear_log_probs", "log_probs", "linear_topk_kl", "topk_kl"]
PATIENCE = timedelta(seconds=2)


def kind(call: Any, asked: dict[str, Any]) -> tuple[str, float]:
    """The type of the error, and after how long."""
    begin = time.monotonic()
    try:
        call(asked)
        return "nothing", time.monotonic() - begin
    except Exception as error:
        return type(error).__name__, time.monotonic() - begin


def late(rank: int, world: int, function: str, seconds: float, patience: timedelta) -> tuple[str, float]:
    """Rank 1 comes so much later."""
    group = dist.new_group(range(world), timeout=patience)
    time.sleep(seconds * rank)
    return kind(CALLS[function], given(rank) | {"shard": shard(*CUTS[rank : rank + 2], group)})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_rank_that_is_late(rank_pool: RankPool, function: str) -> None:
    assert [said for said, _ in rank_pool.run(2, late, function, 0.5, 30 * PATIENCE)] == ["nothing", "nothing"]


def test_a_rank_that_is_too_late_is_the_back_ends_error_in_time(rank_pool: RankPool) -> None:
    for said, seconds in rank_pool.run(2, late, "linear_log_probs", 4.0, PATIENCE):
        assert said not in ("nothing", "InputError", "DisagreementError") and seconds < 60


def alone(rank: int, world: int, way: str) -> tuple[str, float]:
    """What keeps rank 1 from the comparison: it cannot know with whom to make it, or fails before, or in its checks."""
    group = dist.new_group(range(world), timeout=PATIENCE)
    asked = given(rank) | {"shard": shard(*CUTS[rank : rank + 2], group)}
    if rank == 1 and way == "no shard":
        asked |= {"shard": None, "targets": asked["targets"] % 8}
    if rank == 1 and way == "no shard at all":
        asked |= {"shard": (4, 12)}
    if rank == 1 and way == "another argument":
        asked |= {"entropie": "loss"}
    return kind(CALLS["linear_log_probs"], asked)


@pytest.mark.parametrize(
    ("way", "own"), [("no shard", "nothing"), ("no shard at all", "InputError"), ("another argument", "TypeError")]
)
def test_a_rank_that_cannot_tell_is_waited_for_no_longer_than_the_timeout(
    rank_pool: RankPool, way: str, own: str
) -> None:
    waiting, (said, _) = rank_pool.run(2, alone, way)
    assert said == own
    assert waiting[0] not in ("nothing", "InputError", "DisagreementError") and 1 < waiting[1] < 60


def refused_with_nobody_there(rank: int, world: int) -> tuple[str, str]:
    """Rank 1 does not come, and rank 0's own checks raise: that is its error, not the back end's."""
    group = dist.new_group(range(world), timeout=PATIENCE)
    if rank == 1:
        return "", ""
    asked = given(0) | {"shard": shard(0, 4, group), "temperature": 0.0}
    return said_by(CALLS["log_probs"], asked), kind(CALLS["log_probs"], asked)[0]


def test_a_refusal_that_nobody_hears_is_still_ones_own_error(rank_pool: RankPool) -> None:
    own, _ = rank_pool.run(2, refused_with_nobody_there)
    assert own == ("InputError: the temperature must be positive and finite, got 0.0", "InputError")


def groups_of_two_sizes(rank: int, world: int) -> tuple[str, float]:
    two, three = dist.new_group([0, 1], timeout=PATIENCE), dist.new_group(range(3), timeout=PATIENCE)
    bounds = [(0, 4), (4, 12), (12, 12)][rank]
    asked = given(min(rank, 1)) | {"shard": shard(*bounds, two if rank == 0 else three)}
    if rank == 2:
        asked |= {"logits": asked["logits"].detach()[:, :0]}
    return kind(CALLS["log_probs"], asked)


def test_groups_of_two_sizes_wait_for_each_other_no_longer_than_the_timeout(rank_pool: RankPool) -> None:
    for said, seconds in rank_pool.run(3, groups_of_two_sizes):
        assert said not in ("nothing", "InputError", "DisagreementError") and seconds < 60


def of_another_cut(rank: int, world: int) -> str:
    """Slices 2 and 3 of four, in a group of two."""
    return said_by(CALLS["log_probs"], given(1) | {"shard": shard(16 + 8 * rank, 24 + 8 * rank)})


def test_a_cut_for_more_ranks_than_there_are(rank_pool: RankPool) -> None:
    told = "got [16, 24), [24, 32) of ranks 0 to 1, and no rank holds the ids [0, 16)"
    for said in rank_pool.run(2, of_another_cut):
        assert said.startswith(f"DisagreementError: the ranks' shards must cover the vocabulary once, {told}")


def without_rows(rank: int, world: int, function: str) -> list[dict[str, int]]:
    per_row = ("hidden", "logits", "targets", "teacher_log_probs", "teacher_ids")
    asked = given(rank)
    asked |= {name: asked[name].detach()[:0].requires_grad_(asked[name].requires_grad) for name in per_row}
    counts = []
    for check_ranks in (True, False):
        with count_collectives() as forward:
            out = CALLS[function](asked | {"check_ranks": check_ranks})
        with count_collectives() as backward:
            out.sum().backward()
        counts += [dict(forward), dict(backward)]
    return counts


@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_rows_the_calls_are_the_same(rank_pool: RankPool, function: str) -> None:
    own = 2 if "topk" in function else 1
    back = {"all_reduce": 1} if "linear" in function else {}
    expected = [{"all_gather_into_tensor": own + 1}, back, {"all_gather_into_tensor": own}, back]
    assert rank_pool.run(2, without_rows, function) == [expected] * 2


def whole(rank: int, world: int) -> dict[str, int]:
    """A vocabulary of its own, in no group and in a group of one, may be asked anything."""
    one = [dist.new_group([each]) for each in range(world)][rank]
    asked = given(0) | {
        "temperature": 1.0 + rank,
        "targets": torch.arange(5) % 4,
        "teacher_ids": torch.arange(15).view(5, 3) % 4,
    }
    with count_collectives() as counts:
        for function in FUNCTIONS:
            for group in (None, one):
                CALLS[function](asked | {"shard": None if group is None else shard(0, 4, group)})
    return dict(counts)


def test_no_message_where_there_is_no_other_rank(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, whole) == [{}, {}]


def without_memory(rank: int, world: int) -> dict[str, int]:
    asked = {name: each.to("meta") if isinstance(each, torch.Tensor) else each for name, each in given(rank).items()}
    with meta_collectives(), count_collectives() as counts:
        assert CALLS["log_probs"](asked).device.type == "meta"
    return dict(counts)


def test_tensors_without_memory_are_not_compared(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, without_memory) == [{"all_gather_into_tensor": 1}] * 2


def compiled(rank: int, world: int, whole: bool) -> str:
    """Whole, of ids whose values are not on the host, as on a GPU, and of two temperatures; or with breaks."""
    asked = given(rank) | {"temperature": 1.0 + rank if whole else 1.0}
    torch._dynamo.reset()
    try:
        with mock.patch.object(validation, "check_row_ids", lambda *_, **__: None) if whole else nullcontext():
            values = torch.compile(CALLS["log_probs"], fullgraph=whole, backend="eager")(asked)
        assert torch.equal(values, CALLS["log_probs"](asked | {"check_ranks": False}))
    finally:
        torch._dynamo.reset()
    return said_by(CALLS["log_probs"], asked)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="dynamo cannot trace this Python's cached_property")
def test_a_graph_that_was_whole_stays_whole_and_is_not_compared(rank_pool: RankPool) -> None:
    for eager in rank_pool.run(2, compiled, True):
        assert eager.startswith("DisagreementError: ")


def test_a_compiled_call_with_breaks_gives_what_it_gave(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, compiled, False) == ["nothing", "nothing"]
