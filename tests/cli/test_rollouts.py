"""The reader of users' rollouts: what it takes, and what it says of what it cannot take."""

from __future__ import annotations

import json
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest

from compact_logits.cli.rollouts import SHIPPED, Rollout, pack_rollouts, read_rollouts
from compact_logits.errors import CompactLogitsError

GOOD = {"tokens": [5, 6, 7, 8], "loss_mask": [1, 0], "response_length": 2}


def line(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def read(folder: Path, content: bytes, **options: Any) -> list[Rollout]:
    path = folder / "r.jsonl"
    path.write_bytes(content)
    return read_rollouts(path, vocab=10, **options)


def test_reads_what_was_written(tmp_path: Path) -> None:
    text = b"\xef\xbb\xbf" + line() + b"\r\n\n  \n" + line(tokens=[0, 9], loss_mask=[1], response_length=1, reward=0.5)
    rollouts = read(tmp_path, text + b"\n" + line(tokens=[3], loss_mask=[], response_length=0))
    assert [rollout.tokens for rollout in rollouts] == [[5, 6, 7, 8], [0, 9], [3]]
    assert [rollout.loss_mask for rollout in rollouts] == [[1, 0], [1], []]
    assert [rollout.response_length for rollout in rollouts] == [2, 1, 0]


HOSTILE = [
    (b"", "needed at least one rollout, got an empty file"),
    (b"\n \n", "needed at least one rollout, got an empty file"),
    (line()[:-9], "needed one JSON object, got text that breaks off or goes wrong"),
    (line() + line(), "needed one JSON object, got text that breaks off or goes wrong: Extra data"),
    (b"\x80\x04\x95 binary", "needed UTF-8 text, got byte 0x80 at 0"),
    (b"\x00" * 40, "needed one JSON object"),
    (b"\x1b[31mred", "needed one JSON object"),
    (b"[" * 100_000, "got brackets nested too deeply"),
    (b"[1, 2]", "needed a JSON object with tokens, loss_mask, response_length, got [1, 2]"),
    (b"null", "needed a JSON object with tokens, loss_mask, response_length, got None"),
    (b"{}", "needed the fields tokens, loss_mask, response_length, got none named tokens"),
    (b'{"tokens": [1, 2], "loss_mask": [1]}', "got none named response_length"),
    (line(tokens="5678"), "tokens must be a list of whole numbers, got '5678'"),
    (line(tokens=None), "tokens must be a list of whole numbers, got None"),
    (line(tokens={"a": 1}), "tokens must be a list of whole numbers, got {'a': 1}"),
    (line(tokens=[5, -1, 7, 8]), "tokens[1] must be an id from 0 to 9, below the vocabulary size 10, got -1"),
    (line(tokens=[5, 6, 7, 10]), "tokens[3] must be an id from 0 to 9, below the vocabulary size 10, got 10"),
    (line(tokens=[5, 6.0, 7, 8]), "tokens[1] must be an id from 0 to 9, below the vocabulary size 10, got 6.0"),
    (line(tokens=[5, True, 7, 8]), "tokens[1] must be an id from 0 to 9, below the vocabulary size 10, got True"),
    (
        line(tokens=[5, float("nan"), 7, 8]),
        "tokens[1] must be an id from 0 to 9, below the vocabulary size 10, got nan",
    ),
    (line(tokens=[5, [6], 7, 8]), "tokens[1] must be an id from 0 to 9, below the vocabulary size 10, got [6]"),
    (b'{"tokens": [' + b"9" * 5000 + b"]}", "got none named loss_mask"),
    (line(tokens=[5, 10**30]), "tokens[1] must be an id from 0 to 9, below the vocabulary size 10, got 1e+30"),
    (
        line(tokens=[], loss_mask=[], response_length=0),
        "tokens must hold at least the prompt's last token, got an empty",
    ),
    (line(loss_mask=[1, 2]), "loss_mask[1] must be 0 or 1, got 2"),
    (line(loss_mask=[0.5, 1]), "loss_mask[0] must be 0 or 1, got 0.5"),
    (line(loss_mask=[float("nan"), 1]), "loss_mask[0] must be 0 or 1, got nan"),
    (line(loss_mask=[float("inf"), 1]), "loss_mask[0] must be 0 or 1, got inf"),
    (line(loss_mask="11"), "loss_mask must be a list of whole numbers, got '11'"),
    (line(loss_mask=[1]), "one entry for each response token, got 1 entries and response_length 2"),
    (line(loss_mask=[1] * 9), "one entry for each response token, got 9 entries and response_length 2"),
    (line(response_length=-1), "response_length must be a whole number, 0 or more, got -1"),
    (line(response_length="2"), "response_length must be a whole number, 0 or more, got '2'"),
    (line(response_length=2.0), "response_length must be a whole number, 0 or more, got 2.0"),
    (line(response_length=True), "response_length must be a whole number, 0 or more, got True"),
    (line(response_length=4, loss_mask=[1] * 4), "less than the number of tokens"),
    (line(response_length=10**30), "response_length must be a whole number, 0 or more, got 1e+30"),
]


@pytest.mark.parametrize(("content", "said"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_input_is_named_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(CompactLogitsError) as caught:
        read(tmp_path, content)
    text = str(caught.value)
    assert said in text
    assert f"{tmp_path}/r.jsonl" in text
    assert text.isprintable(), "one line, and no control characters from the file"
    assert len(text) < 400


def test_the_line_is_counted_with_blank_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"r\.jsonl:4: tokens\[0\]"):
        read(tmp_path, line() + b"\n\n" + line() + b"\n" + line(tokens=["x"]) + b"\n")


def test_a_long_line_is_not_read_to_its_end(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"r\.jsonl:2: needed a line of at most 200 bytes, got a longer one"):
        read(tmp_path, line() + b"\n" + b" " * 10_000, max_line_bytes=200)
    assert len(read(tmp_path, line().ljust(200) + b"\n", max_line_bytes=201)) == 1
    with pytest.raises(ValueError, match="needed a line of at most 1000 bytes"):
        read_rollouts("/dev/zero", vocab=10, max_line_bytes=1000)


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needed a readable JSONL file, got .*/none: No such file"):
        read_rollouts(tmp_path / "none", vocab=10)
    with pytest.raises(ValueError, match="needed a readable JSONL file, got .*: Is a directory"):
        read_rollouts(tmp_path, vocab=10)


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_a_pickle_is_not_executed(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    with pytest.raises(ValueError, match="needed UTF-8 text|needed one JSON object"):
        read(tmp_path, pickle.dumps(Trap(trap)))
    assert not trap.exists()


def test_packing_keeps_every_rollout_and_the_budget() -> None:
    rollouts = [Rollout([number] * length, []) for number, length in enumerate([3, 7, 5, 2, 6, 1])]
    batches = pack_rollouts(rollouts, token_budget=8)
    assert sorted(rollout.tokens[0] for batch in batches for rollout in batch) == [0, 1, 2, 3, 4, 5]
    assert [sum(len(rollout.tokens) for rollout in batch) for batch in batches] == [8, 8, 8]
    with pytest.raises(
        ValueError, match="at most 6 tokens, the budget of a micro-batch, got one of 7; raise the budget"
    ):
        pack_rollouts(rollouts, token_budget=6)


def test_the_shipped_file_is_what_it_says() -> None:
    rollouts = read_rollouts(SHIPPED, vocab=512)
    tokens = sum(len(rollout.tokens) for rollout in rollouts)
    counted = sum(sum(rollout.loss_mask) for rollout in rollouts)
    assert len(rollouts) == 24
    assert 0.15 < counted / tokens < 0.3
    assert sum(1 for rollout in rollouts if not any(rollout.loss_mask)) == 1
    for rollout in rollouts:
        turns = sum(b > a for a, b in zip([0, *rollout.loss_mask[:-1]], rollout.loss_mask, strict=True))
        assert turns >= 3 or not any(rollout.loss_mask), "several assistant turns, with tool output between them"
    assert not SHIPPED.stat().st_mode & stat.S_IXUSR
