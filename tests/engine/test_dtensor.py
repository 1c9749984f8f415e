"""Where a DTensor's vocabulary lies: read from the placements, checked against the DTensor's own slices."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from compact_logits.engine.dtensor import VocabPlacement, chunk_bounds
from compact_logits.errors import InputError
from tests.support.meshes import cut, mesh_of
from tests.support.ranks import RankPool


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 10, 16, 50257])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 7])
def test_bounds_are_those_of_torch_chunk(size: int, chunks: int) -> None:
    widths = [part.numel() for part in torch.arange(size).chunk(chunks)] if size else []
    bounds = [chunk_bounds(size, chunks, index) for index in range(chunks)]
    assert [stop - start for start, stop in bounds] == (widths + [0] * chunks)[:chunks]
    assert [start for start, _ in bounds[1:]] == [stop for _, stop in bounds[:-1]]
    assert bounds[-1][1] == size


def slices(rank: int, world: int, vocab: int) -> list[tuple[int, int, list[int]]]:
    """For each way to shard the last dimension on all ranks: start, stop and the ids that stand in the local tensor."""
    found = []
    whole = torch.arange(vocab).expand(2, 3, vocab)
    for sizes, placements in (((world,), [Shard(2)]), ((1, world), [Replicate(), Shard(2)])):
        logits = cut(whole.contiguous(), mesh_of(*sizes), placements)
        placement = VocabPlacement.of(logits, dim=-1, row_dims=(0, 1))
        assert placement.vocab == vocab and placement.axis == len(sizes) - 1
        assert placement.shard.group is not None and placement.shard.group.size() == world
        found.append((placement.shard.start, placement.shard.stop, logits.to_local()[0, 0].tolist()))
    return found


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("vocab", [1, 5, 8, 11])
def test_offsets_come_from_the_placement_also_of_uneven_and_empty_shards(
    rank_pool: RankPool, world: int, vocab: int
) -> None:
    for found in rank_pool.run(world, slices, vocab):
        for start, stop, ids in found:
            assert ids == list(range(start, stop))


def groups(rank: int, world: int) -> list[list[int]]:
    """The ranks of the vocabulary's group, when it is the second and when it is the first axis of a 2 x 2 mesh."""
    mesh, logits = mesh_of(2, 2), torch.zeros(4, 3, 6)
    found = []
    for placements in ([Shard(0), Shard(2)], [Shard(2), Shard(0)]):
        group = VocabPlacement.of(cut(logits, mesh, placements), dim=2, row_dims=(0,)).shard.group
        found.append(torch.distributed.get_process_group_ranks(group))
    return found


def test_the_group_is_that_of_the_mesh_axis(rank_pool: RankPool) -> None:
    assert rank_pool.run(4, groups) == [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]


def refusals(rank: int, world: int) -> list[str]:
    mesh, logits = mesh_of(2, 2), torch.zeros(4, 4, 8)
    partial = DTensor.from_local(logits, mesh, [Replicate(), Partial()], run_check=False)
    uneven = DTensor.from_local(
        logits[..., :5], mesh, [Replicate(), Shard(2)], run_check=False, shape=(4, 4, 8), stride=(32, 8, 1)
    )
    cases = [
        (partial, (0, 1)),
        (cut(logits, mesh, [Shard(2), Shard(2)]), (0, 1)),
        (cut(logits, mesh, [Shard(1), Shard(2)]), (0,)),
        (uneven, (0, 1)),
    ]
    messages = []
    for tensor, row_dims in cases:
        with pytest.raises(InputError) as error:
            VocabPlacement.of(tensor, dim=2, row_dims=row_dims)
        messages.append(str(error.value))
    return messages


def test_a_placement_that_does_not_say_where_the_vocabulary_lies_is_refused(rank_pool: RankPool) -> None:
    first = rank_pool.run(4, refusals)[0]
    assert "Partial value is not summed yet; redistribute it" in first[0] and "'tp'" in first[0]
    assert "sharded on two mesh axes; redistribute it to one" in first[1]
    assert "dimension 1 is sharded on mesh axis 'dp'; needed Replicate() there" in first[2]
    assert "this rank's slice is [0, 4), but its local tensor holds 5; build uneven shards with" in first[3]


def rows(rank: int, world: int) -> tuple[list[int], list[int], str]:
    mesh = mesh_of(2, 2)
    placement = VocabPlacement.of(cut(torch.zeros(3, 2, 4), mesh, [Shard(0), Shard(2)]), dim=2, row_dims=(0,))
    ids = torch.arange(6).view(3, 2)
    replicated = placement.local_rows(cut(ids, mesh, [Replicate(), Replicate()]), "input_ids")
    already = placement.local_rows(cut(ids, mesh, [Shard(0), Replicate()]), "input_ids")
    with pytest.raises(InputError) as error:
        placement.local_rows(cut(ids, mesh, [Replicate(), Shard(0)]), "input_ids")
    return replicated.flatten().tolist(), already.flatten().tolist(), str(error.value)


def test_ids_follow_the_batch_and_are_never_gathered(rank_pool: RankPool) -> None:
    for rank, (replicated, already, refused) in enumerate(rank_pool.run(4, rows)):
        assert replicated == already == ([0, 1, 2, 3] if rank < 2 else [4, 5])
        assert "needed [Shard(dim=0), Replicate()], or Replicate() throughout" in refused
