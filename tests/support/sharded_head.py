"""A linear head cut over the vocabulary, one slice a rank, and the slices' results put together again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from compact_logits import VocabShard
from tests.support.linear_head import Head

__all__ = ["of_rank", "shard_of", "whole"]


def shard_of(rank: int, cuts: list[int]) -> VocabShard:
    """The slice `cuts[rank] <= id < cuts[rank + 1]`, in the default group."""
    assert dist.group.WORLD is not None
    return VocabShard(cuts[rank], cuts[rank + 1], dist.group.WORLD)


def of_rank(head: Head, rank: int, cuts: list[int]) -> Head:
    """The same rows and targets, and the rank's rows of weight and bias."""
    ids = slice(cuts[rank], cuts[rank + 1])
    return replace(head, weight=head.weight[ids].clone(), bias=None if head.bias is None else head.bias[ids].clone())


def whole(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What one rank would have: the vocabulary's parts joined, the rest from rank 0 once all ranks have its bits."""
    first, *others = results
    for name in first:
        if name not in ("d_weight", "d_bias"):
            assert all(torch.equal(first[name], other[name]) for other in others), f"{name} differs between ranks"
    joined = {n: torch.cat([r[n] for r in results]) for n in ("d_weight", "d_bias") if n in first}
    return {name: joined.get(name, first[name]) for name in first}
