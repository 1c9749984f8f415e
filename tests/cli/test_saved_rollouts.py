"""slime's saved debug rollouts: read as slime would read them, and whatever is hostile named in one line, never run."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from compact_logits.cli import rollouts
from compact_logits.cli.saved_rollouts import MAX_TOKENS, read_any_rollouts
from compact_logits.errors import CompactLogitsError, InputError
from tests.support.source_tree import ROOT
from tests.upstream.slime.tree import needs_trees

# As slime's Sample.to_dict has it, less what is of no matter here.
SAMPLE: dict[str, Any] = {
    "index": 3,
    "prompt": [{"role": "user", "content": "hi"}],
    "tokens": [5, 6, 7, 8],
    "response": "x",
    "response_length": 2,
    "loss_mask": [1, 0],
    "reward": {"score": 1.0},
    "rollout_log_probs": [-0.1, -0.2],
    "rollout_top_p_token_ids": torch.tensor([1, 2], dtype=torch.int32),
    "remove_sample": False,
    "status": "completed",
    "metadata": {"turn": 1},
}


def save(path: Path, *samples: Any, **changes: Any) -> Path:
    torch.save({"rollout_id": 0, "samples": list(samples), **changes}, path)
    return path


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_samples_are_read_as_slime_trains_on_them(tmp_path: Path) -> None:
    path = save(
        tmp_path / "0.pt",
        SAMPLE,
        {**SAMPLE, "loss_mask": None},
        {**SAMPLE, "remove_sample": True},
        {**SAMPLE, "tokens": torch.tensor([5, 6, 7], dtype=torch.int32), "loss_mask": torch.tensor([0, 1])},
        {**SAMPLE, "response_length": 0, "loss_mask": None},
    )
    rollouts = read_any_rollouts(path, vocab=10)
    assert [rollout.tokens for rollout in rollouts] == [[5, 6, 7, 8]] * 3 + [[5, 6, 7], [5, 6, 7, 8]]
    assert [rollout.loss_mask for rollout in rollouts] == [[1, 0], [1, 1], [0, 0], [0, 1], []]


def test_jsonl_is_told_apart_also_where_it_comes_through_a_pipe(tmp_path: Path) -> None:
    line = json.dumps({key: SAMPLE[key] for key in ("tokens", "loss_mask", "response_length")}).encode()
    path = tmp_path / "r.jsonl"
    path.write_bytes(line)
    assert len(read_any_rollouts(path, vocab=10)) == 1
    reading, writing = os.pipe()
    os.write(writing, line + b"\n" + line)
    os.close(writing)
    try:
        assert len(read_any_rollouts(f"/dev/fd/{reading}", vocab=10)) == 2
    finally:
        os.close(reading)


def test_a_named_pipe_is_read_once_and_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(rollouts, "PIPE_WAIT_S", 0.2)
    with pytest.raises(InputError, match=r"pipe: needed rollouts, got a pipe into which nobody wrote for 0\.2 seconds"):
        read_any_rollouts(pipe, vocab=10)
    monkeypatch.setattr(rollouts, "PIPE_WAIT_S", 20.0)
    line = json.dumps({key: SAMPLE[key] for key in ("tokens", "loss_mask", "response_length")}).encode()
    writer = threading.Thread(target=pipe.write_bytes, args=(line + b"\n" + line,))
    writer.start()
    assert len(read_any_rollouts(pipe, vocab=10)) == 2
    writer.join(20)
    assert not writer.is_alive()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": [5, -1, 7]}, "sample 0: tokens[1] must be an id from 0 to 9"),
        ({"tokens": [5, 10, 7]}, "sample 0: tokens[1] must be an id from 0 to 9"),
        ({"tokens": "abc"}, "sample 0: tokens must be a list of whole numbers"),
        ({"tokens": [[5]]}, "sample 0: tokens[0] must be an id"),
        ({"tokens": torch.zeros(3)}, "tokens must be one row of whole numbers, got a tensor (3,) of torch.float32"),
        ({"tokens": torch.zeros(3, 2, dtype=torch.int64)}, "got a tensor (3, 2) of torch.int64"),
        (
            {"tokens": torch.zeros(1, dtype=torch.int64).expand(10**12)},
            f"tokens must have at most {MAX_TOKENS} entries, got 10000000",
        ),
        ({"tokens": torch.tensor([1, 0]).to_sparse()}, "tokens must be one row of whole numbers"),
        ({"tokens": torch.empty(5, dtype=torch.int64, device="meta")}, "tokens must be one row of whole numbers"),
        ({"loss_mask": [1] * 9}, "one entry for each response token, got 9 entries and response_length 2"),
        ({"loss_mask": [0.5, 1]}, "loss_mask[0] must be 0 or 1, got 0.5"),
        ({"response_length": -1, "loss_mask": None}, "response_length must be a whole number, 0 or more, got -1"),
        ({"response_length": 10**15, "loss_mask": None}, "less than the number of tokens"),
        ({"response_length": "2", "remove_sample": True, "loss_mask": None}, "response_length must be a whole number"),
    ],
    ids=range(14),
)
def test_samples_that_are_none(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    check(save(tmp_path / "0.pt", {**SAMPLE, **changes}), said)


def check(path: Path, said: str) -> None:
    with pytest.raises(CompactLogitsError) as caught:
        read_any_rollouts(path, vocab=10)
    text = str(caught.value)
    assert said in text and str(path) in text
    assert text.isprintable() and len(text) < 420


def test_a_pickle_bomb_is_not_sprung(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    check(
        save(tmp_path / "0.pt", {**SAMPLE, "metadata": Trap(trap)}),
        "got one that calls for posix.mkdir, which is not run",
    )
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Trap(trap)))
    check(tmp_path / "bare.pt", "got a bare pickle, which is not opened")
    with zipfile.ZipFile(tmp_path / "zip.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Trap(trap)))
        archive.writestr("archive/version", "3\n")
    check(tmp_path / "zip.pt", "needed tensors and plain values as slime saves them")
    assert not trap.exists()


def test_files_that_are_none(tmp_path: Path) -> None:
    whole = save(tmp_path / "0.pt", SAMPLE).read_bytes()
    for name, content, said in (
        ("cut.pt", whole[: len(whole) // 2], "got one that is damaged"),
        ("head.pt", b"PK\x03\x04", "got one that is damaged"),
        ("flipped.pt", whole.replace(b"tokens", b"\xff\xfe\x00\x01\x02\x03"), "got a damaged file: "),
    ):
        (tmp_path / name).write_bytes(content)
        check(tmp_path / name, said)
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10**7)
    check(tmp_path / "bomb.pt", "which does not compress, got a compressed one")
    torch.save([1, 2], tmp_path / "list.pt")
    check(tmp_path / "list.pt", "needed a dict with a list of samples")
    check(save(tmp_path / "empty.pt"), "needed a dict with a list of samples")
    check(save(tmp_path / "odd.pt", 7), ": sample 0: needed a dict of its fields, got a int")
    check(tmp_path / "none.pt", "No such file")
    check(tmp_path, "Is a directory")


def test_a_line_of_a_gibibyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.write(b'{"tokens": [')
        file.truncate(2**30)
    check(path, "needed a line of at most 16777216 bytes, got a longer one")


SAVE = """
import sys, torch
from tests.upstream.slime.tree import load_actor
load_actor()
from slime.observability.rollout_data_utils import save_debug_rollout_data
from slime.utils.types import Sample
samples = [
    Sample(index=0, prompt="p", tokens=[1, 2, 3, 4], response_length=2, loss_mask=[0, 1], reward=1.0,
           status=Sample.Status.TRUNCATED, rollout_log_probs=[-0.5, -0.25]),
    Sample(index=1, tokens=[1, 2, 3], response_length=2, status=Sample.Status.COMPLETED),
    Sample(index=2, tokens=[1, 2, 3], response_length=1, remove_sample=True, status=Sample.Status.ABORTED,
           rollout_top_p_token_ids=torch.tensor([3]), rollout_top_p_token_offsets=torch.tensor([0, 1])),
]
save_debug_rollout_data(sys.argv[1] + "/{rollout_id}.pt", samples, rollout_id=7, evaluation=False)
"""


@needs_trees
def test_a_file_that_slime_itself_has_saved(tmp_path: Path) -> None:
    call = [sys.executable, "-c", SAVE, str(tmp_path)]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    rollouts = read_any_rollouts(tmp_path / "7.pt", vocab=10)
    assert [rollout.tokens for rollout in rollouts] == [[1, 2, 3, 4], [1, 2, 3], [1, 2, 3]]
    assert [rollout.loss_mask for rollout in rollouts] == [[0, 1], [1, 1], [0]]
