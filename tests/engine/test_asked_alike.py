"""Ranks of a sharded vocabulary that call the numeric functions with different things: an error on all, at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compact_logits.engine.rank_check import check_cover
from compact_logits.errors import DisagreementError
from tests.support.asked_calls import CALLS, REMEDY, ROWS, TOLD, given, said_by, shard
from tests.support.ranks import RankPool

PER_ROW = ("hidden", "logits", "targets", "teacher_log_probs", "teacher_ids")
Asked = dict[str, Any]
Way = tuple[Callable[[Asked], Asked], str]  # what rank 1 is asked instead, and what is said of it


def with_(**changed: Any) -> Callable[[Asked], Asked]:
    return lambda asked: asked | changed


def of(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Asked], Asked]:
    return lambda asked: asked | {name: change(asked[name])}


def rows(count: int) -> Callable[[Asked], Asked]:
    """Only so many rows."""

    def change(asked: Asked) -> Asked:
        cut = {name: asked[name].detach()[:count] for name in PER_ROW}
        return asked | {name: each.requires_grad_(asked[name].requires_grad) for name, each in cut.items()}

    return change


def sliced(start: int, stop: int) -> Callable[[Asked], Asked]:
    """A slice with other bounds, and tensors that fit it."""

    def change(asked: Asked) -> Asked:
        weight, logits = torch.ones(stop - start, 4), torch.ones(ROWS, stop - start)
        return asked | {"weight": weight, "logits": logits, "shard": shard(start, stop)}

    return change


def narrow(asked: Asked) -> Asked:
    wide = ("hidden", "weight", "logits")
    return asked | {name: asked[name].detach().bfloat16().requires_grad_() for name in wide}


def differs(name: str) -> str:
    return f"{name} of rank 1 is not that of rank 0"


# Without the comparison all these are wrong numbers; then those that end a process or hang.
SLICES: dict[str, Way] = {
    "a hole": (sliced(5, 12), "got [0, 4), [5, 12) of ranks 0 to 1, and no rank holds the ids [4, 5)"),
    "an overlap": (sliced(3, 12), "got [0, 4), [3, 12) of ranks 0 to 1, and two ranks hold the ids [3, 4)"),
}
SILENT: dict[str, Way] = {
    "temperature": (with_(temperature=0.7), differs("the temperature")),
    "temperature a row": (with_(temperature=torch.full((ROWS,), 0.7)), differs("the temperature")),
}
LOUD: dict[str, Way] = {
    "fewer rows": (rows(3), "the number of rows is 5 on rank 0, 3 on rank 1"),
    "no rows": (rows(0), "the number of rows is 5 on rank 0, 0 on rank 1"),
}
LOG_PROB = "one of entropy, sum_p2, vocab_size, "
OF_TARGETS: dict[str, Way] = {
    "targets": (of("targets", lambda ids: ids.flip(0)), differs("the target ids")),
}
OF_TEACHER: dict[str, Way] = {
    "ids": (of("teacher_ids", lambda ids: ids.flip(0)), differs("the teacher's ids")),
    "order": (of("teacher_ids", lambda ids: ids.flip(1)), differs("the teacher's ids")),
    "log-probs": (of("teacher_log_probs", lambda q: q - 1e-3), differs("the teacher's log-probs")),
}
BOUNDS = "one of tail_mass_eps, log_prob_min_clamp, k, dtype, hidden size, bias"
CLAMPED = with_(log_prob_min_clamp=-20.0)  # the teacher's log-probs are above it
WRONG: dict[str, dict[str, Way]] = {
    "linear_log_probs": {
        **OF_TARGETS,
        "vocab_size": (with_(vocab_size=12), differs(LOG_PROB + "fp32_logits, bias, dtype, hidden size")),
        "a bias": (with_(bias=torch.ones(8)), differs(LOG_PROB + "fp32_logits, bias, dtype, hidden size")),
        "dtype": (narrow, differs(LOG_PROB + "fp32_logits, bias, dtype, hidden size")),
    },
    "log_probs": {**OF_TARGETS, "dtype": (narrow, differs(LOG_PROB + "dtype"))},
    "linear_topk_kl": {**OF_TEACHER, "clamp": (CLAMPED, differs(BOUNDS)), "dtype": (narrow, differs(BOUNDS))},
    "topk_kl": {
        **OF_TEACHER,
        "clamp": (CLAMPED, differs(BOUNDS)),
        "mask": (with_(loss_mask=torch.ones(ROWS) > 0), differs("the place of the kept rows")),
    },
}
HUNG: dict[str, dict[str, Way]] = {
    "linear_log_probs": {
        "entropy": (with_(entropy="loss"), differs(LOG_PROB + "fp32_logits, bias, dtype, hidden size")),
        "sum_p2": (with_(sum_p2=True), differs(LOG_PROB + "fp32_logits, bias, dtype, hidden size")),
        "no gradient": (
            of("hidden", Tensor.detach),
            "whether the hidden states need a gradient is 1 on rank 0, 0 on rank 1",
        ),
    },
    "log_probs": {"entropy": (with_(entropy="metric"), differs(LOG_PROB + "dtype"))},
    "linear_topk_kl": {
        "tail": (with_(tail=True), differs(BOUNDS)),
        "no gradient": (
            of("hidden", Tensor.detach),
            "whether the hidden states need a gradient is 1 on rank 0, 0 on rank 1",
        ),
    },
    "topk_kl": {
        "tail": (with_(tail=True), differs(BOUNDS)),
        "k": (
            lambda asked: asked | {name: asked[name][:, :2] for name in ("teacher_ids", "teacher_log_probs")},
            differs(BOUNDS),
        ),
        "mask": (
            with_(loss_mask=torch.arange(ROWS) < 3),
            "the number of kept rows is 5 on rank 0, 3 on rank 1",
        ),
    },
}
FUNCTIONS = list(WRONG)


def ways_of(function: str) -> dict[str, Way]:
    wrong = {f"wrong {name}": way for name, way in (SLICES | SILENT | WRONG[function]).items()}
    return wrong | {f"hung {name}": way for name, way in (LOUD | HUNG[function]).items()}


def asked_differently(rank: int, world: int, function: str, names: list[str], check_ranks: bool) -> dict[str, str]:
    """What each way makes this rank say; after each, a call that all ranks agree on gives what it gave before."""
    call, ways, said = CALLS[function], ways_of(function), {}
    asked = given(rank) | {"check_ranks": check_ranks}
    right = call(asked)
    for name in names:
        said[name] = said_by(call, ways[name][0](asked) if rank == 1 else asked)
        assert torch.equal(call(asked), right)
    right.sum().backward()
    return said


def words(name: str, told: str) -> str:
    if name.removeprefix("wrong ") in SLICES:
        return f"the ranks' shards must cover the vocabulary once, {told}; pass the VocabShard of each rank's own slice"
    return TOLD + told + REMEDY


@pytest.mark.parametrize("function", FUNCTIONS)
def test_ranks_asked_different_things_all_say_so(rank_pool: RankPool, function: str) -> None:
    ways = ways_of(function)
    expected = {name: f"DisagreementError: {words(name, told)}" for name, (_, told) in ways.items()}
    assert rank_pool.run(2, asked_differently, function, list(ways), True) == [expected] * 2


@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_the_comparison_they_are_wrong_numbers(rank_pool: RankPool, function: str) -> None:
    silent = [name for name in ways_of(function) if name.startswith("wrong")]
    quiet = dict.fromkeys(silent, "nothing")
    assert rank_pool.run(2, asked_differently, function, silent, False) == [quiet] * 2


@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_the_comparison_other_rows_end_or_hang_a_rank(rank_pool: RankPool, function: str) -> None:
    assert rank_pool.run(2, asked_differently, function, [], False) == [{}, {}]  # the ranks are there, and agree
    with pytest.raises(AssertionError, match=r"died with exit code|had not answered|RuntimeError"):
        rank_pool.run(2, asked_differently, function, ["hung fewer rows"], False, timeout=5)


REFUSED: dict[str, tuple[Callable[[Asked], Asked], str]] = {
    "temperature": (with_(temperature=0.0), "the temperature must be positive and finite, got 0.0"),
    "budget": (with_(chunk_bytes=0), "chunk_bytes must be a positive whole number of bytes or None, got 0"),
    "switch": (with_(check_ranks="yes"), "check_ranks must be True or False, got 'yes'; pass one of the two"),
    "no tensors": (
        with_(hidden=[1], logits=[1], lm_head_weight=[1]),
        r"needed a tensor as (hidden|logits), got '\[1\]' of list",
    ),
    "shape": (
        lambda asked: asked | {name: asked[name][:4] for name in ("targets", "teacher_log_probs", "teacher_ids")},
        r"needed .*, got \(4",
    ),
    "an id": (
        lambda asked: asked | {name: asked[name] - 13 for name in ("targets", "teacher_ids")},
        "(targets|teacher_ids) must be vocabulary ids, got -1",
    ),
}


def refused(rank: int, world: int, function: str, refusing: list[int]) -> dict[str, str]:
    call, said = CALLS[function], {}
    asked = given(rank)
    right = call(asked)
    for name, (change, _) in REFUSED.items():
        said[name] = said_by(call, change(asked) if rank in refusing else asked)
        assert torch.equal(call(asked), right)
    return said


@pytest.mark.parametrize("refusing", [[1], [0], [0, 1]], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_rank_that_refuses_what_it_is_given_tells_the_others(
    rank_pool: RankPool, function: str, refusing: list[int]
) -> None:
    told = f"of the group that shares this vocabulary refused what {function} was given there, so that no rank computes"
    for rank, said in enumerate(rank_pool.run(2, refused, function, refusing)):
        for name, (_, own) in REFUSED.items():
            words = own if rank in refusing else f"rank {refusing[0]} {told} it; the error raised there says why$"
            assert re.match(f"InputError: {words}", said[name]), (name, said[name])


def another_function(rank: int, world: int) -> str:
    return said_by(CALLS[FUNCTIONS[rank]], given(rank))


def test_another_function_is_another_question(rank_pool: RankPool) -> None:
    told = f"DisagreementError: {TOLD}{differs('the function')}{REMEDY}"
    assert rank_pool.run(2, another_function) == [told] * 2


@pytest.mark.parametrize(
    ("bounds", "fault"),
    [
        ([(0, 4), (4, 9)], None),
        ([(4, 9), (0, 4)], None),
        ([(0, 4), (4, 4), (4, 9), (9, 9)], None),
        ([(0, 4), (2, 2), (4, 9), (0, 0)], None),  # what holds nothing may stand anywhere
        ([(0, 0), (0, 0)], None),
        ([(10, 15), (15, 20)], "no rank holds the ids [0, 10)"),
        ([(0, 4), (6, 9)], "no rank holds the ids [4, 6)"),
        ([(0, 9), (3, 5)], "two ranks hold the ids [3, 5)"),
        ([(0, 4), (3, 9)], "two ranks hold the ids [3, 4)"),
        ([(0, 9), (0, 9)], "two ranks hold the ids [0, 9)"),
    ],
)
def test_shards_cover_the_vocabulary_once(bounds: list[tuple[int, int]], fault: str | None) -> None:
    if fault is None:
        check_cover(bounds)
        return
    with pytest.raises(DisagreementError, match=re.escape(fault) + "; pass the VocabShard of each rank's own slice$"):
        check_cover(bounds)
