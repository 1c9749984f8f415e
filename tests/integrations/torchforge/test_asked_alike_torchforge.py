"""torchforge's log-probs where the ranks of a vocabulary's mesh axis ask for different things, or one asks in vain."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from compact_logits.integrations import torchforge
from tests.support.asked_calls import CALLS, REMEDY, ROWS, TOLD, of_mesh, said_by
from tests.support.meshes import mesh_of
from tests.support.ranks import RankPool
from tests.support.torchforge_plain import plain_logprobs
from tests.support.torchforge_tree import forge_modules

Asked = dict[str, Any]
Change = Callable[[Asked], Asked]
WHY = "so that no rank computes it; the error raised there says why"


def with_(**changed: Any) -> Change:
    return lambda asked: asked | changed


def differs(name: str) -> str:
    return f"{name} of rank 1 is not that of rank 0"


def ways_of(ids: Tensor) -> dict[str, tuple[Change, str]]:
    some = ids.clone()
    some[1, 1] = -100
    settings = "one of batch, positions, align, dtype"
    return {
        "ids": (with_(input_ids=ids.flip(0)), differs("the target ids")),
        "an ignored id": (with_(input_ids=some), differs("the target ids")),
        "temperature": (with_(temperature=0.7), differs("the temperature")),
        "fewer ids": (with_(input_ids=ids[:, :2]), "the number of rows is 6 on rank 0, 4 on rank 1"),
        "align": (with_(input_ids=torch.zeros(2, ROWS, dtype=torch.int64), align=False), "the number of rows is 6"),
        "one position less": (
            lambda asked: asked | {"hidden": asked["hidden"][:, 1:].detach().requires_grad_()},
            differs(settings + ", hidden size, bias"),
        ),
        "no gradient": (
            lambda asked: asked | {"hidden": asked["hidden"].detach()},
            "whether the hidden states need a gradient is 1 on rank 0, 0 on",
        ),
    }


def asked_differently(rank: int, world: int, function: str) -> dict[str, str]:
    call, said = CALLS[function], {}
    asked = of_mesh(rank)
    asked.pop("hidden" if function == "compute_logprobs" else "logits")
    right = call(asked)
    for name, (change, _) in ways_of(asked["input_ids"]).items():
        if "hidden" in asked or name not in ("one position less", "no gradient"):
            said[name] = said_by(call, change(asked) if rank == 1 else asked)
            assert torch.equal(call(asked), right)
    for name, changed in (("an id", {"input_ids": asked["input_ids"] + 12}), ("T", {"temperature": 0.0})):
        said[name] = said_by(call, asked | changed if rank == 1 else asked)
        assert torch.equal(call(asked), right)
    return said


@pytest.mark.parametrize("function", ["compute_logprobs", "compute_logprobs_from_hidden"])
def test_over_dtensors(rank_pool: RankPool, function: str) -> None:
    first, second = rank_pool.run(2, asked_differently, function)
    ways = ways_of(torch.zeros(2, 3, dtype=torch.int64))
    assert len(first) == (9 if function.endswith("hidden") else 7)
    for name, said in first.items():
        if name in ways:
            assert said == second[name] and said.startswith(f"DisagreementError: {TOLD}{ways[name][1]}"), said
        else:
            assert said.startswith(
                f"InputError: rank 1 of the group that shares this vocabulary refused what {function}"
            )
    assert second["an id"].startswith("InputError: input_ids must be below the vocabulary size 12, got ")
    assert second["T"] == "InputError: the temperature must be positive and finite, got 0.0"


def fewer_positions(rank: int, world: int) -> str:
    """Hidden states sharded on their positions, of which rank 1 has fewer than its part."""
    asked, mesh = of_mesh(rank), mesh_of(world)
    asked.pop("logits")
    asked |= {"align": False, "input_ids": torch.zeros(2, ROWS, dtype=torch.int64)}
    whole = asked["hidden"].detach()
    mine = whole.chunk(world, dim=1)[rank][:, rank:]
    asked["hidden"] = DTensor.from_local(
        mine, mesh, [Shard(1)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return said_by(CALLS["compute_logprobs_from_hidden"], asked)


def test_a_rank_that_has_not_its_part_of_the_positions(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, fewer_positions)
    assert first.startswith(
        "InputError: rank 1 of the group that shares this vocabulary refused what compute_logprobs_from"
    )
    assert second.startswith("InputError: this rank's row count is ")


def through_torchforge(rank: int, world: int, check_ranks: str) -> dict[str, Any]:
    """What torchforge's own function, replaced, answers of DTensors on rank 1's other ids and impossible ones."""
    os.environ["COMPACT_LOGITS"], os.environ["COMPACT_LOGITS_CHECK_RANKS"] = "1", check_ranks
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("compact_logits").addHandler(handler)
    asked = of_mesh(rank)
    logits, ids = asked["logits"].detach(), asked["input_ids"]
    whole = logits.full_tensor()
    try:
        with forge_modules():
            function = sys.modules["forge.util.ops"]
            torchforge.install()
            sharded = torchforge.installation.ShardedLogits(logits)
            other = said_by(lambda given: function.compute_logprobs(sharded, given), ids.flip(0) if rank else ids)
            cold = function.compute_logprobs(sharded, ids, -1.0 if rank else 1.0)
            torchforge.uninstall()
    finally:
        logging.getLogger("compact_logits").removeHandler(handler)
    torch.testing.assert_close(cold, plain_logprobs(whole, ids, -1.0 if rank else 1.0), atol=1e-5, rtol=1e-5)
    return {"other ids": other, "told": told}


def test_torchforge_takes_on_every_rank_what_one_refuses_and_on_none_what_differs(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, through_torchforge, "1")
    assert first["other ids"] == second["other ids"] == f"DisagreementError: {TOLD}{differs('the target ids')}{REMEDY}"
    taken = "torchforge's own compute_logprobs takes this call: "
    refused = "rank 1 of the group that shares this vocabulary refused what compute_logprobs was given there, "
    assert first["told"] == [taken + refused + WHY]
    assert second["told"] == [taken + "the temperature must be positive and finite, got -1.0"]
