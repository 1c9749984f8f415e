"""The message by which ranks compare their calls: what it says, how it travels, and a rank that does not send it."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compact_logits.engine.rank_check import digest, gather_facts, raise_difference, rank_message
from compact_logits.errors import InputError
from tests.support.collectives import count_collectives
from tests.support.rank_calls import CALLS, CUTS, DIFFERENT, REMEDY, arguments, shard
from tests.support.ranks import RankPool

PATIENCE = timedelta(seconds=2)


def timed(call: Any, given: dict[str, Any]) -> tuple[str, float]:
    """The type of the error, and after how long."""
    begin = time.monotonic()
    try:
        call(given)
        return "nothing", time.monotonic() - begin
    except Exception as error:
        return type(error).__name__, time.monotonic() - begin


def late(rank: int, world: int, seconds: float, patience: timedelta) -> tuple[str, float]:
    """Rank 1 comes so much later."""
    group = dist.new_group(range(world), timeout=patience)
    time.sleep(seconds * rank)
    return timed(CALLS["log_probs"], arguments(rank) | {"shard": shard(*CUTS[rank : rank + 2], group)})


def test_a_rank_that_is_late_is_waited_for_until_the_timeout(rank_pool: RankPool) -> None:
    assert [kind for kind, _ in rank_pool.run(2, late, 0.5, 30 * PATIENCE)] == ["nothing", "nothing"]
    for kind, seconds in rank_pool.run(2, late, 4.0, PATIENCE):
        assert kind not in ("nothing", "InputError", "DisagreementError") and seconds < 60


def alone(rank: int, world: int, way: str) -> tuple[str, float]:
    """What keeps rank 1 from the comparison: it cannot know with whom to make it, or fails before its checks."""
    group = dist.new_group(range(world), timeout=PATIENCE)
    given = arguments(rank) | {"shard": shard(*CUTS[rank : rank + 2], group)}
    if rank == 1 and way == "no shard":
        given |= {"shard": None, "targets": given["targets"] % 8}
    if rank == 1 and way == "not a shard":
        given |= {"shard": (4, 12)}
    if rank == 1 and way == "another argument":
        given |= {"entropie": "loss"}
    if way == "refused with nobody there":
        given |= {"temperature": 0.0}
        if rank == 1:
            return "", 0.0
    return timed(CALLS["linear_log_probs"], given)


@pytest.mark.parametrize(
    ("way", "own", "other"),
    [
        ("no shard", "nothing", None),
        ("not a shard", "InputError", None),
        ("another argument", "TypeError", None),
        ("refused with nobody there", "", "InputError"),  # a rank's own error, not the back end's
    ],
)
def test_a_rank_that_does_not_come(rank_pool: RankPool, way: str, own: str, other: str | None) -> None:
    (kind, seconds), (of_rank_1, _) = rank_pool.run(2, alone, way)
    assert of_rank_1 == own and seconds < 60
    assert kind == other or (other is None and kind not in ("nothing", "InputError", "DisagreementError"))


def groups_of_two_sizes(rank: int, world: int) -> tuple[str, float]:
    two, three = dist.new_group([0, 1], timeout=PATIENCE), dist.new_group(range(3), timeout=PATIENCE)
    bounds = [(0, 4), (4, 12), (12, 12)][rank]
    given = arguments(min(rank, 1)) | {"shard": shard(*bounds, two if rank == 0 else three)}
    if rank == 2:
        given |= {"logits": given["logits"].detach()[:, :0]}
    return timed(CALLS["log_probs"], given)


def test_groups_of_two_sizes_wait_for_each_other_no_longer_than_the_timeout(rank_pool: RankPool) -> None:
    for kind, seconds in rank_pool.run(3, groups_of_two_sizes):
        assert kind not in ("nothing", "InputError", "DisagreementError") and seconds < 60


def gathered_facts(rank: int, world: int, facts: list[dict[str, Any]]) -> str:
    assert dist.group.WORLD is not None
    mine = {name: digest(fact) if isinstance(fact, Tensor) else fact for name, fact in facts[rank].items()}
    with count_collectives() as counts:
        of_ranks = gather_facts(dist.group.WORLD, list(mine.values()), torch.device("cpu"))
    assert counts == {"all_gather_into_tensor": 1}
    try:
        raise_difference(mine, of_ranks)
    except InputError as error:
        return str(error)
    return ""


def test_a_difference_of_one_of_three_ranks(rank_pool: RankPool) -> None:
    same = {"the number of rows": 5, "the ids": torch.arange(4)}
    assert rank_pool.run(3, gathered_facts, [same, same, same]) == [""] * 3
    fewer, others = same | {"the number of rows": 4}, same | {"the ids": torch.arange(4).flip(0)}
    error = DIFFERENT + "the number of rows is 5 on rank 0, 4 on rank 1, 5 on rank 2" + REMEDY
    assert rank_pool.run(3, gathered_facts, [same, fewer, same]) == [error] * 3
    error = DIFFERENT + "the ids of rank 2 is not that of rank 0" + REMEDY
    assert rank_pool.run(3, gathered_facts, [same, same, others]) == [error] * 3


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


class Copies(TorchDispatchMode):
    """Counts the operators that are given a tensor on the host and have a result on another device."""

    between_devices = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if isinstance(out, Tensor) and not out.is_cpu and any(each.is_cpu for each in given):
            self.between_devices += 1
        return out


class Group:
    """One rank, of which a message is not sent."""

    def size(self) -> int:
        return 1


def test_what_the_host_knows_travels_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compact_logits.engine.rank_check.all_gather", lambda received, sent, _: received.copy_(sent))
    group: Any = Group()
    values: list[int | Tensor] = [3, torch.tensor(7), 2**40, -1]
    assert rank_message(group, values, torch.device("cpu")).tolist() == [[3, 7, 2**40, -1]]
    values += [torch.zeros((), dtype=torch.int64, device="meta")] * 2
    with Copies() as copies:
        message = rank_message(group, values, torch.device("meta"))
    assert message.shape == (1, 6) and message.device.type == "meta" and copies.between_devices == 1
