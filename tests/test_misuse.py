"""Tensor-parallel ranks that were asked different things: the same error on each, at once, and life goes on."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compact_logits.agreement import check_agreement, digest
from compact_logits.cli.cpu_model import build_gpt, cpu_megatron
from compact_logits.errors import InputError
from compact_logits.megatron import Request, attach, mark
from compact_logits.megatron.output_layer import armed
from compact_logits.rows import RowSelection
from compact_logits.scorers.top_p import TopPMask
from tests.support.asked_calls import REMEDY, TOLD
from tests.support.collectives import count_collectives
from tests.support.gpt_paths import VOCAB, Cut, Micro, micro_batch
from tests.support.marked_gpt import call, kept_scalars
from tests.support.ranks import RankPool


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1, 2, 3]), torch.tensor([1, 3, 2])),
        (torch.tensor([3, 0]), torch.tensor([0, 1])),
        (torch.tensor([1, 2]), torch.tensor([1, 2, 0])),
        (torch.tensor([], dtype=torch.int64), torch.tensor([0])),
        (torch.tensor([True, False]), torch.tensor([False, True])),
        (torch.tensor([0.7]), torch.tensor([0.7]).nextafter(torch.tensor([1.0]))),
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
        (torch.tensor([2**62, 2**62]), torch.tensor([-(2**62), -(2**62)])),
    ],
)
def test_digests_differ(one: Tensor, other: Tensor) -> None:
    assert digest(one) != digest(other) and digest(one) == digest(one.clone())
    assert digest(one).shape == () and digest(one).dtype == torch.int64


def test_digests_of_many_lists_are_all_different() -> None:
    random = torch.Generator().manual_seed(0)
    lists = {tuple(torch.randint(4, (int(length),), generator=random).tolist()) for length in torch.arange(2000) % 9}
    assert len({int(digest(torch.tensor(each, dtype=torch.int64))) for each in lists}) == len(lists) > 500


def agrees(rank: int, world: int, facts: list[dict[str, Any]]) -> str:
    assert dist.group.WORLD is not None
    mine = {name: digest(fact) if isinstance(fact, Tensor) else fact for name, fact in facts[rank].items()}
    with count_collectives() as counts:
        try:
            check_agreement(dist.group.WORLD, mine, torch.device("cpu"))
            told = ""
        except InputError as error:
            told = str(error)
    assert counts == {"all_gather_into_tensor": 1}
    return told


def test_every_rank_names_the_same_difference(rank_pool: RankPool) -> None:
    same = {"the number of rows": 5, "the ids": torch.arange(4)}
    assert rank_pool.run(3, agrees, [same, same, same]) == [""] * 3
    fewer = same | {"the number of rows": 4}
    told = TOLD + "the number of rows is 5 on rank 0, 4 on rank 1, 5 on rank 2" + REMEDY
    assert rank_pool.run(3, agrees, [same, fewer, same]) == [told] * 3
    others = same | {"the ids": torch.arange(4).flip(0)}
    told = TOLD + "the ids of rank 2 is not that of rank 0" + REMEDY
    assert rank_pool.run(3, agrees, [same, same, others]) == [told] * 3


# What rank 1 is asked instead, and what is said of it.


def fewer_rows(micro: Micro, request: Request) -> Request:
    kept = micro.selection.host_indices[:-3]
    return replace(request, selection=selection_of(micro, kept))


def selection_of(micro: Micro, kept: Tensor) -> RowSelection:
    keep = torch.zeros(micro.layout.num_rows, dtype=torch.bool)
    keep[kept] = True
    return RowSelection.build(keep, micro.layout.label_source, torch.arange(200) % VOCAB)


def other_rows(micro: Micro, request: Request) -> Request:
    free = [
        row
        for row in range(micro.layout.num_rows)
        if micro.layout.label_source[row] >= 0 and row not in micro.selection.host_indices
    ]
    kept = micro.selection.host_indices.clone()
    kept[0] = free[0]
    return replace(request, selection=selection_of(micro, kept.sort().values))


def other_tokens(micro: Micro, request: Request) -> Request:
    return replace(request, selection=replace(request.selection, targets=request.selection.targets.flip(0)))


def another_temperature(micro: Micro, request: Request) -> Request:
    return replace(request, temperature=0.7)


def a_temperature_per_row(micro: Micro, request: Request) -> Request:
    return replace(request, temperature=torch.full((request.selection.kept,), 0.7))


def another_entropy(micro: Micro, request: Request) -> Request:
    return replace(request, entropy="none")


def a_nucleus(micro: Micro, request: Request) -> Request:
    kept = request.selection.kept
    return replace(request, nucleus=TopPMask(torch.arange(kept), torch.arange(kept), torch.ones(kept, dtype=torch.bool)))


def rows_that_do_not_fit(micro: Micro, request: Request) -> Request:
    return replace(request, batch=2)


KEPT = micro_batch(0, Cut(2), "holes").selection.kept
WAYS = {
    fewer_rows: f"the number of kept rows is {KEPT} on rank 0, {KEPT - 3} on rank 1",
    other_rows: "the place of the kept rows of rank 1 is not that of rank 0",
    other_tokens: "the target ids of rank 1 is not that of rank 0",
    another_temperature: "the temperature of rank 1 is not that of rank 0",
    a_temperature_per_row: "the temperature of rank 1 is not that of rank 0",
    another_entropy: "the entropy, batch size, dtype or vocabulary size asked for of rank 1 is not that of rank 0",
    a_nucleus: "the recorded nucleus of rank 1 is not that of rank 0",
    rows_that_do_not_fit: "whether a rank refuses its hidden states is 0 on rank 0, 1 on rank 1",
}


def asked_differently(rank: int, world: int, sequence_parallel: bool) -> dict[str, str]:
    """What each way makes this rank say; after each, a call that all ranks agree on gives what it gave before."""
    said = {}
    with cpu_megatron(rank, world, tp=2):
        model = build_gpt(tp=2, vocab=VOCAB, layers=1, sequence_parallel=sequence_parallel)
        attach(model)
        micro = micro_batch(rank, Cut(2), "holes")
        request = Request(micro.selection, entropy="loss")
        right = kept_scalars(call(model, micro, mark(micro.loss_mask.clone(), request)), micro, request)
        for way in WAYS:
            asked = way(micro, replace(request, outcome=None)) if rank == 1 else replace(request, outcome=None)
            try:
                call(model, micro, mark(micro.loss_mask.clone(), asked))
                said[way.__name__] = "nothing"
            except InputError as error:
                said[way.__name__] = str(error)
            assert "forward" not in vars(model.output_layer)
            again = replace(request, outcome=None)
            output = call(model, micro, mark(micro.loss_mask.clone(), again))
            assert torch.equal(kept_scalars(output, micro, again), right)
    return said


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_case_4_2_ranks_asked_different_things_all_say_so(rank_pool: RankPool, sequence_parallel: bool) -> None:
    expected = {way.__name__: TOLD + told + REMEDY for way, told in WAYS.items()}
    assert rank_pool.run(2, asked_differently, sequence_parallel, timeout=60) == [expected, expected]


def frozen_on_one(rank: int, world: int) -> str:
    with cpu_megatron(rank, world, tp=2):
        model = build_gpt(tp=2, vocab=VOCAB, layers=1)
        attach(model)
        model.requires_grad_(rank == 0)
        micro = micro_batch(rank, Cut(2), "holes")
        with pytest.raises(InputError) as caught:
            call(model, micro, mark(micro.loss_mask.clone(), Request(micro.selection)))
        return str(caught.value)


def test_a_rank_that_will_not_take_part_in_backward_is_named(rank_pool: RankPool) -> None:
    told = TOLD + "whether the hidden states need a gradient is 1 on rank 0, 0 on rank 1" + REMEDY
    assert rank_pool.run(2, frozen_on_one) == [told] * 2


def counted(rank: int, world: int, sequence_parallel: bool, check_ranks: bool, mask: str) -> list[dict[str, int]]:
    with cpu_megatron(rank, world, tp=2):
        model = build_gpt(tp=2, vocab=VOCAB, layers=1, sequence_parallel=sequence_parallel)
        micro = micro_batch(rank, Cut(2), mask)
        hidden = torch.randn(micro.layout.num_rows // (2 if sequence_parallel else 1), 1, 32, requires_grad=True)
        request = Request(micro.selection, chunk_bytes=1, check_ranks=check_ranks)
        with armed(model.output_layer, request):
            with count_collectives() as forward:
                answer, _ = model.output_layer(hidden)
            with count_collectives() as backward:
                answer.sum().backward()
        return [dict(forward), dict(backward)]


@pytest.mark.parametrize("mask", ["holes", "nothing"])
@pytest.mark.parametrize("check_ranks", [True, False])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_one_small_message_more_whatever_is_asked(
    rank_pool: RankPool, sequence_parallel: bool, check_ranks: bool, mask: str
) -> None:
    gathers = 1 + sequence_parallel + check_ranks
    back = {"reduce_scatter_tensor": 1} if sequence_parallel else {"all_reduce": 1}
    every = rank_pool.run(2, counted, sequence_parallel, check_ranks, mask)
    assert every == [[{"all_gather_into_tensor": gathers}, back]] * 2


def late(rank: int, world: int, seconds: float, comes: bool) -> tuple[str, float]:
    """Rank 1 comes so much later, or raises instead; said is what came of it, and after how long."""
    group = dist.new_group(range(world), timeout=timedelta(seconds=2))
    begin = time.monotonic()
    try:
        if rank == 1:
            time.sleep(seconds)
            if not comes:
                raise KeyError("on purpose")
        check_agreement(group, {"the number of rows": 3}, torch.device("cpu"))
        return "agreed", time.monotonic() - begin
    except Exception as error:
        return type(error).__name__, time.monotonic() - begin


def test_a_rank_that_is_late_or_raises_is_an_error_in_time(rank_pool: RankPool) -> None:
    assert [said for said, _ in rank_pool.run(2, late, 0.5, True)] == ["agreed", "agreed"]
    waits = rank_pool.run(2, late, 0.0, False, timeout=30)
    assert waits[1][0] == "KeyError" and waits[0][0] not in ("agreed", "KeyError") and waits[0][1] < 10
    for said, seconds in rank_pool.run(2, late, 4.0, True, timeout=30):
        assert said not in ("agreed", "InputError") and seconds < 15
