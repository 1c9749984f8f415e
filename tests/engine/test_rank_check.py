"""Ranks of a sharded vocabulary that make different calls: the same error on all, at once, and no hang."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compact_logits.engine import rank_check
from compact_logits.engine.kernels.verify import Verdict
from compact_logits.engine.rank_check import check_cover
from compact_logits.errors import DisagreementError
from tests.support.rank_calls import CALLS, CUTS, DIFFERENT, REMEDY, ROWS, arguments, outcome, shard
from tests.support.ranks import RankPool

FUNCTIONS = ["linear_log_probs", "log_probs", "linear_topk_kl", "topk_kl"]
PER_ROW = ("hidden", "logits", "targets", "teacher_log_probs", "teacher_ids")

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]

each_function = pytest.mark.parametrize("function", FUNCTIONS)


def with_(**changed: Any) -> Change:
    return lambda given: given | changed


def of(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda given: given | {name: change(given[name])}


def rows(count: int) -> Change:
    """Only so many rows."""

    def change(given: Arguments) -> Arguments:
        cut = {name: given[name].detach()[:count] for name in PER_ROW}
        return given | {name: each.requires_grad_(given[name].requires_grad) for name, each in cut.items()}

    return change


def cut(start: int, stop: int) -> Change:
    """A shard with other bounds, and tensors that fit it."""
    weight, logits = torch.ones(stop - start, 4), torch.ones(ROWS, stop - start)
    return lambda given: given | {"weight": weight, "logits": logits, "shard": shard(start, stop)}


def narrow(given: Arguments) -> Arguments:
    wide = ("hidden", "weight", "logits")
    return given | {name: given[name].detach().bfloat16().requires_grad_() for name in wide}


def unknown_id(given: Arguments) -> Arguments:
    return given | {name: given[name].masked_fill(given[name] == 3, 12) for name in ("targets", "teacher_ids")}


def differs(name: str) -> str:
    return f"{name} of rank 1 is not that of rank 0"


# What rank 1 is given instead, and what every rank then says. Without the comparison these are wrong numbers.
COVER = "the ranks' shards must cover the vocabulary once, "
SILENT: dict[str, tuple[Change, str]] = {
    "a hole": (cut(5, 12), COVER + "got [0, 4), [5, 12) of ranks 0 to 1, and no rank holds the ids [4, 5)"),
    "an overlap": (cut(3, 12), COVER + "got [0, 4), [3, 12) of ranks 0 to 1, and two ranks hold the ids [3, 4)"),
    "temperature": (with_(temperature=0.7), differs("the temperature")),
    "temperature a row": (with_(temperature=torch.full((ROWS,), 0.7)), differs("the temperature")),
}
OF_TARGETS = {"targets": (of("targets", lambda ids: ids.flip(0)), differs("the target ids"))}
OF_TEACHER = {
    "ids": (of("teacher_ids", lambda ids: ids.flip(0)), differs("the teacher's ids")),
    "order": (of("teacher_ids", lambda ids: ids.flip(1)), differs("the teacher's ids")),
    "log-probs": (of("teacher_log_probs", lambda q: q - 1e-3), differs("the teacher's log-probs")),
}
LOG_PROB, HEAD = "one of entropy, sum_p2, ", "one of entropy, sum_p2, vocab_size, fp32_logits, bias, dtype, hidden size"
KL = "one of tail_mass_eps, log_prob_min_clamp, k, dtype, hidden size, bias"
DTYPE: dict[str, tuple[Change, str]] = {"dtype": (narrow, "dtype")}
WRONG: dict[str, dict[str, tuple[Change, str]]] = {
    "linear_log_probs": OF_TARGETS
    | DTYPE
    | {"vocab_size": (with_(vocab_size=12), LOG_PROB), "a bias": (with_(bias=torch.ones(8)), LOG_PROB)},
    "log_probs": OF_TARGETS | DTYPE,
    "linear_topk_kl": OF_TEACHER | DTYPE,
    "topk_kl": OF_TEACHER
    | DTYPE
    | {"mask": (with_(loss_mask=torch.ones(ROWS) > 0), differs("the place of the kept rows"))},
}
# Without it these end a process or hang it.
LOUD: dict[str, tuple[Change, str]] = {
    "fewer rows": (rows(3), "the number of rows is 5 on rank 0, 3 on rank 1"),
    "no rows": (rows(0), "the number of rows is 5 on rank 0, 0 on rank 1"),
}
NO_GRADIENT: dict[str, tuple[Change, str]] = {
    "no gradient": (
        of("hidden", Tensor.detach),
        "whether the hidden states need a gradient is 1 on rank 0, 0 on rank 1",
    )
}
FORMS: dict[str, tuple[Change, str]] = {
    "tail": (with_(tail=True), KL),
    "clamp": (with_(log_prob_min_clamp=-20.0), KL),  # the teacher's log-probs are above it
}
SHORT = {name: lambda q: q[:, :2] for name in ("teacher_ids", "teacher_log_probs")}
HUNG: dict[str, dict[str, tuple[Change, str]]] = {
    "linear_log_probs": NO_GRADIENT
    | {"entropy": (with_(entropy="loss"), LOG_PROB), "sum_p2": (with_(sum_p2=True), LOG_PROB)},
    "log_probs": {"entropy": (with_(entropy="metric"), LOG_PROB)},
    "linear_topk_kl": NO_GRADIENT | FORMS,
    "topk_kl": FORMS
    | {
        "k": (lambda given: given | {name: change(given[name]) for name, change in SHORT.items()}, KL),
        "mask": (with_(loss_mask=torch.arange(ROWS) < 3), "the number of kept rows is 5 on rank 0, 3 on rank 1"),
    },
}


def changes_of(function: str) -> dict[str, tuple[Change, str]]:
    wrong = {f"wrong {name}": each for name, each in (SILENT | WRONG[function]).items()}
    return wrong | {f"hung {name}": each for name, each in (LOUD | HUNG[function]).items()}


def with_changes(rank: int, world: int, function: str, names: list[str], check_ranks: bool | None) -> dict[str, str]:
    """What each change makes this rank say; after each, a call that all ranks agree on gives what it gave before."""
    call, changes, outcomes = CALLS[function], changes_of(function), {}
    given = arguments(rank)
    right = call(given | {"check_ranks": check_ranks})
    for name in names:
        if check_ranks is None:  # at the first call of a group
            own = shard(*CUTS[rank : rank + 2], dist.new_group(range(world)))
            given = arguments(rank) | {"shard": own}
        changed = changes[name][0](given) if rank == 1 else given
        if check_ranks is None and changed["shard"] is not given["shard"]:
            changed["shard"] = shard(changed["shard"].start, changed["shard"].stop, given["shard"].group)
        outcomes[name] = outcome(call, changed | {"check_ranks": check_ranks})
        assert torch.equal(call(given | {"check_ranks": check_ranks}), right)
    right.sum().backward()
    return outcomes


@each_function
@pytest.mark.parametrize("check_ranks", [True, None])
def test_every_rank_names_the_same_difference(rank_pool: RankPool, function: str, check_ranks: bool | None) -> None:
    changes = changes_of(function)
    first, second = rank_pool.run(2, with_changes, function, list(changes), check_ranks)
    assert first == second and first.keys() == changes.keys()
    for name, (_, text) in changes.items():
        start, end = (COVER, "; pass the VocabShard of each rank's own slice") if COVER in text else (DIFFERENT, REMEDY)
        assert first[name].startswith(f"DisagreementError: {start}") and first[name].endswith(end), first[name]
        assert text in first[name], first[name]


@each_function
def test_without_the_comparison_they_are_wrong_numbers(rank_pool: RankPool, function: str) -> None:
    silent = [name for name in changes_of(function) if name.startswith("wrong")]
    assert rank_pool.run(2, with_changes, function, silent, False) == [dict.fromkeys(silent, "nothing")] * 2


def test_without_the_comparison_other_rows_end_or_hang_a_rank(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, with_changes, "log_probs", [], False) == [{}, {}]  # the ranks are there, and agree
    with pytest.raises(AssertionError, match=r"died with exit code|had not answered|RuntimeError"):
        rank_pool.run(2, with_changes, "log_probs", ["hung fewer rows"], False, timeout=5)


REFUSED: dict[str, tuple[Change, str]] = {
    "temperature": (with_(temperature=0.0), "the temperature must be positive and finite, got 0.0"),
    "budget": (with_(chunk_bytes=0), "chunk_bytes must be a positive whole number of bytes or None, got 0"),
    "switch": (with_(check_ranks="yes"), "check_ranks must be True or False, got 'yes'"),
    "no tensors": (with_(hidden=[1], logits=[1]), r"needed a tensor as (hidden|logits), got '\[1\]' of list"),
    "shape": (
        lambda given: given | {name: given[name][:4] for name in ("targets", "teacher_log_probs", "teacher_ids")},
        r"needed .*, got \(4",
    ),
    "an id": (
        lambda given: given | {name: given[name] - 13 for name in ("targets", "teacher_ids")},
        "(targets|teacher_ids) must be vocabulary ids, got -1",
    ),
}


def refused(rank: int, world: int, function: str, refusing: list[int]) -> dict[str, str]:
    call, outcomes = CALLS[function], {}
    given = arguments(rank) | {"check_ranks": True}
    right = call(given)
    for name, (change, _) in REFUSED.items():
        outcomes[name] = outcome(call, change(given) if rank in refusing else given)
        assert torch.equal(call(given), right)
    return outcomes


@pytest.mark.parametrize("refusing", [[1], [0], [0, 1]], ids=str)
@each_function
def test_if_any_rank_refuses_its_arguments_every_rank_raises(
    rank_pool: RankPool, function: str, refusing: list[int]
) -> None:
    elsewhere = f"rank {refusing[0]} of the group that shares this vocabulary refused what {function} was given there"
    for rank, outcomes in enumerate(rank_pool.run(2, refused, function, refusing)):
        for name, (_, own) in REFUSED.items():
            assert re.match(f"InputError: {own if rank in refusing else elsewhere}", outcomes[name]), outcomes[name]


def unknown_ids(rank: int, world: int) -> dict[str, list[str]]:
    """An id past the vocabulary, given on both ranks: the vocabulary's size is that of all shards or `vocab_size`."""
    given, found = unknown_id(arguments(rank)), {}
    for function in FUNCTIONS:
        found[function] = [outcome(CALLS[function], given | {"check_ranks": flag}) for flag in (True, False)]
    for function in ("linear_log_probs", "log_probs"):
        known = arguments(rank)
        known["targets"] = known["targets"].masked_fill(known["targets"] == 3, 9).clamp(max=9)
        for size in (9, 10):
            found[f"{function} {size}"] = [outcome(CALLS[function], known | {"check_ranks": True, "vocab_size": size})]
    return found


def test_an_id_that_no_shard_holds_is_an_error_on_every_rank(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, unknown_ids)
    assert first == second
    for function in FUNCTIONS:
        compared, alone = first[function]
        assert alone == "nothing" and compared.startswith("InputError: the ids of the rows must be from 0 to 11,")
        assert "got 12; pass the tokens of the model's own vocabulary" in compared
    for function in ("linear_log_probs", "log_probs"):
        assert first[f"{function} 9"][0].startswith("InputError: targets must be below vocab_size, 9, got 9")
        assert first[f"{function} 10"] == ["nothing"]


def another_function(rank: int, world: int) -> str:
    return outcome(CALLS[FUNCTIONS[rank]], arguments(rank) | {"check_ranks": True})


def test_another_function_is_another_call(rank_pool: RankPool) -> None:
    error = f"DisagreementError: {DIFFERENT}{differs('the function')}{REMEDY}"
    assert rank_pool.run(2, another_function) == [error] * 2


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


def different_kernels(rank: int, world: int, function: str) -> list[str]:
    """The reasons for which this rank changes to the torch kernels; rank 1 has them already."""
    warned: list[str] = []
    verdict = Verdict(rank == 0, "on purpose")
    with (
        mock.patch.object(rank_check, "verdict", lambda device: verdict),
        mock.patch.object(rank_check, "use_torch_kernels", lambda device, reason: warned.append(reason)),
    ):
        assert outcome(CALLS[function], arguments(rank) | {"check_ranks": True}) == "nothing"
    return warned


@each_function
def test_ranks_of_a_group_run_the_same_kernels(rank_pool: RankPool, function: str) -> None:
    assert rank_pool.run(2, different_kernels, function) == [["those of rank 1 are not proven"], []]
