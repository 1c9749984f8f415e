"""Counts, ids and ranks are whole numbers, of whatever type; anything else is named in one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from compact_logits import VocabShard, scatter
from compact_logits.errors import ConfigError, LayoutError
from compact_logits.rows import contiguous, packed, zigzag
from tests.support.called_with import CALLS, SELECTION, Loud, message


class Whole:
    """What numpy's whole numbers are to Python."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


NO_INTS = [
    ("a", "'a'"),
    (True, "True"),
    (1.0, "1.0"),
    (torch.tensor(True), "a tensor () of torch.bool on cpu"),
    (torch.zeros(10**5), "a tensor (100000,) of torch.float32 on cpu"),
    (10**6000, "an int of some 6001 digits"),
    (Loud(), "'<Loud instance at "),
]
COUNTS: list[tuple[str, str, str]] = [
    *[
        (name, "chunk_bytes", "chunk_bytes must be a positive whole number of bytes or None, got ")
        for name in [*CALLS][:8]
    ],
    *[
        (name, "vocab_size", "vocab_size must be a positive whole number of ids or None, got ")
        for name in ("log_probs", "linear_log_probs", "request")
    ],
    ("request", "batch", "batch must be a positive whole number of sequences, got "),
]


@pytest.mark.parametrize(("name", "setting", "error"), COUNTS)
def test_a_count_is_a_whole_number_of_whatever_type(name: str, setting: str, error: str) -> None:
    for value, text in [*NO_INTS, (0, "0"), (-5, "-5")]:
        assert message(lambda value=value: CALLS[name](**{setting: value})).startswith(error + text)
    plain = CALLS[name](**{setting: 7})
    for seven in (Whole(7), torch.tensor(7)):
        found = CALLS[name](**{setting: seven})
        if name == "request":
            assert type(getattr(found, setting)) is int and getattr(found, setting) == 7
        else:
            first = [each[0] if isinstance(each, tuple) else each for each in (found, plain)]
            assert torch.equal(*first)


def test_sizes_of_a_head_are_whole_numbers() -> None:
    for setting in ("rows", "kept", "vocab", "hidden", "tp", "nucleus_ids", "top_k", "most_on_shard"):
        for value, text in NO_INTS:
            error = message(lambda setting=setting, value=value: CALLS["size"](**{setting: value}))
            assert error.startswith(f"{setting} of a head must be a whole number, got {text}")
    assert message(lambda: CALLS["size"](chunk_bytes=0)).startswith("chunk_bytes must be a positive whole number")


def test_the_ends_of_a_shard_are_whole_numbers() -> None:
    for value, text in [*NO_INTS, (2**63, str(2**63)), (None, "None")]:
        for ends, came in (((value, 1), f"start={text}"), ((0, value), f"start=0, stop={text}")):
            error = message(lambda ends=ends: VocabShard(*ends))
            assert error.startswith("a vocabulary shard's start and stop must be whole numbers, got " + came)
            assert error.endswith("; pass this rank's first id and the one after its last")
    shard = VocabShard(Whole(0), torch.tensor(5))  # type: ignore[arg-type]
    assert shard == VocabShard(0, 5) and type(shard.start) is type(shard.stop) is int
    for group, text in (("tp", "'tp'"), (-100, "-100"), (SimpleNamespace(rank=0), "'namespace(rank=0)' of Simple")):
        error = message(lambda group=group: VocabShard(0, 5, group))
        assert error.startswith(
            f"a vocabulary shard's group must be a process group that this rank is in, or None, got {text}"
        )
        assert error.endswith("; of a mesh, pass mesh.get_group()")


def test_rows_and_shards_are_whole_numbers() -> None:
    values, indices = torch.ones(2), torch.tensor([0, 2])
    assert torch.equal(scatter(values, indices, Whole(3)), torch.tensor([1.0, 0.0, 1.0]))  # type: ignore[arg-type]
    for value, text in [*NO_INTS, (-1, "-1")]:
        error = message(lambda value=value: scatter(values, indices, value))
        assert error.startswith(f"num_rows must be a whole number, 0 or more, got {text}")
        assert error.endswith("; pass how many rows there were")
        error = message(lambda value=value: SELECTION.counts(value))
        assert error.startswith(f"3 rows do not divide into {text}")
        error = message(lambda value=value: SELECTION.of_shard(value, 3))
        assert error.startswith(f"there are the shards 0 to 2, got {text}")
        assert error.endswith("; pass the rank in the group")
    assert message(lambda: SELECTION.of_shard(3, 3)).startswith("there are the shards 0 to 2, got 3")
    assert SELECTION.of_shard(1, 3).tolist() == [0] and SELECTION.of_shard(2, 3).tolist() == []


def test_lengths_and_ranks_of_a_layout_are_whole_numbers() -> None:
    for value, text in NO_INTS:
        for call in (
            lambda value=value: packed([4, value], [1, 1], 20),
            lambda value=value: zigzag([4, value], [1, 1], 20, 0, 2),
            lambda value=value: contiguous([4, value], [1, 1], 20, 0, 2),
        ):
            assert message(call, LayoutError).startswith(f"sample 1 has total_length {text}")
        error = message(lambda value=value: packed([4], [value], 20), LayoutError)
        assert error.startswith(f"sample 0 has response_length {text}")
        assert error.endswith("; lengths are whole numbers of tokens")
        error = message(lambda value=value: packed([4], [1], value), LayoutError)
        assert f"needs 4 rows on this rank, got {text}" in error
        for ends, came in (((value, 2), f"cp_rank {text}"), ((0, value), f"cp_rank 0 and cp_size {text}")):
            error = message(lambda ends=ends: zigzag([4], [1], 20, *ends), LayoutError)
            assert error.startswith("needed 0 <= cp_rank < cp_size, got " + came)
    assert packed([Whole(4)], [torch.tensor(1)], 20) == packed([4], [1], 20)  # type: ignore[list-item]


def test_settings_of_verl() -> None:
    error = "chunked_topk_chunk_size must be a positive whole number of tokens, got "
    for value, text in [*NO_INTS, (0, "0")]:
        found = message(
            lambda value=value: CALLS["verl"](use_chunked_topk=True, chunked_topk_chunk_size=value), ConfigError
        )
        assert found.startswith(error + text)
    assert CALLS["verl"](use_chunked_topk=True, chunked_topk_chunk_size=Whole(7)).chunk_rows == 7
    assert CALLS["verl"](use_chunked_topk=False, chunked_topk_chunk_size="x").chunk_rows is None
    # What only the tail-aware loss reads is not judged where another is computed.
    assert CALLS["verl"](loss_mode="forward_kl_topk", tail_mass_eps=10**400).tail_mass_eps == 1e-6
    assert CALLS["verl"](loss_mode="forward_kl_topk_tail", tail_mass_eps=1e-3).tail_mass_eps == 1e-3
