"""torchforge's log-probs where the ranks of a vocabulary's mesh axis are given different things, or one refuses."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from compact_logits.integrations import torchforge
from tests.support.collectives import count_collectives
from tests.support.meshes import cut, mesh_of
from tests.support.rank_calls import CALLS, DIFFERENT, REMEDY, ROWS, VOCAB, mesh_arguments, outcome
from tests.support.ranks import RankPool, run_ranks
from tests.support.torchforge_plain import plain_logprobs
from tests.support.torchforge_tree import forge_modules

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]
REFUSED = "rank 1 of the group that shares this vocabulary refused what "


def with_(**changed: Any) -> Change:
    return lambda given: given | changed


def differs(name: str) -> str:
    return f"{name} of rank 1 is not that of rank 0"


def changes(ids: Tensor) -> dict[str, tuple[Change, str]]:
    """What rank 1 is given instead, and what every rank's error then names."""
    some = ids.clone()
    some[1, 1] = -100
    settings = "one of batch, positions, align, dtype"
    return {
        "ids": (with_(input_ids=ids.flip(0)), differs("the target ids")),
        "an ignored id": (with_(input_ids=some), differs("the place of the kept rows")),
        "temperature": (with_(temperature=0.7), differs("the temperature")),
        "fewer ids": (with_(input_ids=ids[:, :2]), "the number of rows is 6 on rank 0, 4 on rank 1"),
        "align": (with_(input_ids=torch.zeros(2, ROWS, dtype=torch.int64), align=False), "the number of rows is 6"),
        "one position less": (
            lambda given: given | {"hidden": given["hidden"][:, 1:].detach().requires_grad_()},
            differs(settings + ", hidden size, bias"),
        ),
        "no gradient": (
            lambda given: given | {"hidden": given["hidden"].detach()},
            "whether the hidden states need a gradient is 1 on rank 0, 0 on",
        ),
    }


def with_changes(rank: int, world: int, function: str) -> dict[str, str]:
    call, outcomes = CALLS[function], {}
    given = mesh_arguments()
    given.pop("hidden" if function == "compute_logprobs" else "logits")
    right = call(given)
    for name, (change, _) in changes(given["input_ids"]).items():
        if "hidden" in given or name not in ("one position less", "no gradient"):
            outcomes[name] = outcome(call, change(given) if rank == 1 else given)
            assert torch.equal(call(given), right)
    for name, changed in (("an id", {"input_ids": given["input_ids"] + VOCAB}), ("T", {"temperature": 0.0})):
        outcomes[name] = outcome(call, given | changed if rank == 1 else given)
        assert torch.equal(call(given), right)
    return outcomes


@pytest.mark.parametrize("function", ["compute_logprobs", "compute_logprobs_from_hidden"])
def test_every_rank_raises_where_one_differs_or_refuses(rank_pool: RankPool, function: str) -> None:
    first, second = rank_pool.run(2, with_changes, function)
    expected = changes(torch.zeros(2, 3, dtype=torch.int64))
    assert len(first) == (9 if function.endswith("hidden") else 7)
    for name, error in first.items():
        if name in expected:
            assert error == second[name] and error.startswith(f"DisagreementError: {DIFFERENT}{expected[name][1]}")
        else:
            assert error.startswith(f"InputError: {REFUSED}{function}")
    assert second["an id"].startswith(f"InputError: input_ids must be below the vocabulary size {VOCAB}, got ")
    assert second["T"] == "InputError: the temperature must be positive and finite, got 0.0"


def fewer_positions(rank: int, world: int) -> str:
    """Hidden states sharded on their positions, of which rank 1 has fewer than its part."""
    given, mesh = mesh_arguments(), mesh_of(world)
    given.pop("logits")
    given |= {"align": False, "input_ids": torch.zeros(2, ROWS, dtype=torch.int64)}
    whole = given["hidden"].detach()
    mine = whole.chunk(world, dim=1)[rank][:, rank:]
    given["hidden"] = DTensor.from_local(
        mine, mesh, [Shard(1)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return outcome(CALLS["compute_logprobs_from_hidden"], given)


def test_a_rank_that_has_not_its_part_of_the_positions(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, fewer_positions)
    assert first.startswith(f"InputError: {REFUSED}compute_logprobs_from_hidden")
    assert second.startswith("InputError: this rank's row count is ")


def messages(rank: int, world: int, check_ranks: bool | None) -> list[int]:
    """All-gathers of three calls over a mesh axis whose group is new."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    logits = cut(torch.randn(2, 5, VOCAB), mesh, [Replicate(), Shard(2)])
    ids = torch.full((2, 3), -100)  # ignored ids are compared, and are no ids outside the vocabulary
    found = []
    for _ in range(3):
        with count_collectives() as counts:
            assert not torchforge.compute_logprobs(logits, ids, check_ranks=check_ranks).any()
        found.append(sum(counts.values()))
    return found


@pytest.mark.parametrize(("check_ranks", "expected"), [(None, [2, 1, 1]), (True, [2, 2, 2]), (False, [1, 1, 1])])
def test_ranks_compare_at_the_first_call_at_all_or_at_none(check_ranks: bool | None, expected: list[int]) -> None:
    assert run_ranks(2, messages, check_ranks) == [expected] * 2


def through_torchforge(rank: int, world: int) -> dict[str, Any]:
    """What torchforge's own function, replaced, returns where one rank refuses; where both do and do not compare."""
    os.environ["COMPACT_LOGITS"], os.environ["COMPACT_LOGITS_CHECK_RANKS"] = "1", "1"
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("compact_logits").addHandler(handler)
    given = mesh_arguments()
    logits, ids = given["logits"].detach(), given["input_ids"]
    whole, cold = logits.full_tensor(), -1.0 if rank else 1.0
    with forge_modules():
        function = sys.modules["forge.util.ops"]
        torchforge.install()
        sharded = torchforge.installation.ShardedLogits(logits)
        other = outcome(lambda ids: function.compute_logprobs(sharded, ids), ids.flip(0) if rank else ids)
        theirs = function.compute_logprobs(sharded, ids, cold)
        torchforge.uninstall()
        del os.environ["COMPACT_LOGITS_CHECK_RANKS"]
        torchforge.install()
        right = function.compute_logprobs(sharded, ids)
        alone = outcome(lambda ids: function.compute_logprobs(sharded, ids, -1.0), ids)
        torchforge.uninstall()
    torch.testing.assert_close(theirs, plain_logprobs(whole, ids, cold), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(right, plain_logprobs(whole, ids), atol=1e-5, rtol=1e-5)
    return {"other ids": other, "warnings": warnings, "alone": alone}


def test_torchforge_takes_on_every_rank_what_one_refuses_and_on_none_what_differs() -> None:
    first, second = run_ranks(2, through_torchforge)
    for found in (first, second):
        assert found["other ids"] == f"DisagreementError: {DIFFERENT}{differs('the target ids')}{REMEDY}"
        # The group has compared its first call: another rank may be computing what this one refuses.
        assert found["alone"] == "InputError: the temperature must be positive and finite, got -1.0"
    taken = "torchforge's own compute_logprobs takes this call: "
    why = "compute_logprobs was given there, so that no rank computes it; the error raised there says why"
    assert first["warnings"] == [taken + REFUSED + why]
    assert second["warnings"] == [taken + "the temperature must be positive and finite, got -1.0"]
