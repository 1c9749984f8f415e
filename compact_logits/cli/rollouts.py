"""Rollouts from a JSONL file: one trajectory a line, as token ids and the loss mask of its response."""

from __future__ import annotations

import json
import os
import select
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from compact_logits.errors import InputError

__all__ = ["MAX_LINE_BYTES", "PIPE_WAIT_S", "SHIPPED", "Rollout", "checked_rollout", "pack_rollouts", "read_rollouts"]

# Generated, ids below 512: a system and a user prompt, then turns of an assistant (mask 1) and of tools (mask 0), whose
# outputs are most of the tokens. One trajectory failed, and is masked throughout.
SHIPPED = Path(__file__).parent / "data" / "agentic.jsonl"

MAX_LINE_BYTES = 16 * 2**20
PIPE_WAIT_S = 60.0
_FIELDS = ("tokens", "loss_mask", "response_length")


@dataclass(frozen=True)
class Rollout:
    """One trajectory: a prompt of at least one token, and the response, whose tokens count where the mask is 1."""

    tokens: list[int]
    loss_mask: list[int]  # of the response

    @property
    def response_length(self) -> int:
        return len(self.loss_mask)


def read_rollouts(path: str | Path, *, vocab: int, max_line_bytes: int = MAX_LINE_BYTES) -> list[Rollout]:
    """Read and check every line of `path`; blank lines and unknown fields are passed over, nothing is executed.

    Of each line is needed: `tokens`, ids from 0 to below `vocab`; `response_length`, less than there are tokens;
    `loss_mask`, 0 or 1 for each response token. Raises `InputError`, in one line with file, line number, what was
    needed and what came, for the first that is otherwise, for a file that can't be read, for one without rollouts and
    for a pipe into which nobody has written within `PIPE_WAIT_S` seconds.
    """
    rollouts = []
    try:
        with _opened(path) as file:
            for number, line in _lines(file, str(path), max_line_bytes):
                try:
                    rollouts.append(_parse(line, vocab))
                except InputError as error:
                    raise InputError(f"{path}:{number}: {error}") from None
    except OSError as error:
        raise InputError(f"needed a readable JSONL file, got {path}: {error.strerror}") from None
    if not rollouts:
        raise InputError(f"{path}: needed at least one rollout, got an empty file")
    return rollouts


def pack_rollouts(rollouts: list[Rollout], *, token_budget: int) -> list[list[Rollout]]:
    """Micro-batches of at most `token_budget` tokens each, by first fit, longest first; the same for the same input.

    Raises `InputError` where one rollout alone is longer.
    """
    batches: list[list[Rollout]] = []
    room: list[int] = []
    for rollout in sorted(rollouts, key=lambda rollout: -len(rollout.tokens)):
        length = len(rollout.tokens)
        if length > token_budget:
            raise InputError(
                f"needed rollouts of at most {token_budget} tokens, the budget of a micro-batch, got one of {length}; "
                f"raise the budget or cut the rollout"
            )
        fitting = next((index for index, left in enumerate(room) if left >= length), len(room))
        if fitting == len(room):
            batches.append([])
            room.append(token_budget)
        batches[fitting].append(rollout)
        room[fitting] -= length
    return batches


def _opened(path: str | Path) -> IO[bytes]:
    # An ordinary open of a pipe waits for somebody who writes, for ever if need be.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = os.fdopen(descriptor, "rb")
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        if not poller.poll(PIPE_WAIT_S * 1000):
            file.close()
            raise InputError(f"{path}: needed rollouts, got a pipe into which nobody wrote for {PIPE_WAIT_S:g} seconds")
    os.set_blocking(descriptor, True)
    return file


def _lines(file: IO[bytes], path: str, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(max_line_bytes + 1):
        number += 1
        if len(line) > max_line_bytes:
            raise InputError(f"{path}:{number}: needed a line of at most {max_line_bytes} bytes, got a longer one")
        if line.strip():
            yield number, line


def _parse(line: bytes, vocab: int) -> Rollout:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"needed UTF-8 text, got byte 0x{line[error.start]:02x} at {error.start}") from None
    try:
        # Python's own numbers may be longer than it likes to convert, and its parser recurses.
        record = json.loads(text, parse_int=_bounded_int)
    except json.JSONDecodeError as error:
        raise InputError(f"needed one JSON object, got text that breaks off or goes wrong: {error.args[0]}") from None
    except RecursionError:
        raise InputError("needed one JSON object, got brackets nested too deeply") from None
    if not isinstance(record, dict):
        raise InputError(f"needed a JSON object with {', '.join(_FIELDS)}, got {_shown(record)}")
    return checked_rollout(record, vocab)


def checked_rollout(record: dict[str, Any], vocab: int) -> Rollout:
    """The rollout that `record` describes. Raises `InputError` as `read_rollouts` does, without file and line."""
    for field in _FIELDS:
        if field not in record:
            raise InputError(f"needed the fields {', '.join(_FIELDS)}, got none named {field}")
    tokens = _ids(record["tokens"], "tokens", vocab, f"an id from 0 to {vocab - 1}, below the vocabulary size {vocab}")
    loss_mask = _ids(record["loss_mask"], "loss_mask", 2, "0 or 1")
    response_length = record["response_length"]
    if type(response_length) is not int or response_length < 0:
        raise InputError(f"response_length must be a whole number, 0 or more, got {_shown(response_length)}")
    if response_length >= max(len(tokens), 1):
        raise InputError(
            f"response_length must be less than the number of tokens, since the prompt's last token predicts the "
            f"response's first, got {response_length} and {len(tokens)} tokens"
        )
    if len(loss_mask) != response_length:
        raise InputError(
            f"loss_mask must have one entry for each response token, got {len(loss_mask)} entries and "
            f"response_length {response_length}"
        )
    if not tokens:
        raise InputError("tokens must hold at least the prompt's last token, got an empty list")
    return Rollout(tokens, loss_mask)


def _ids(values: Any, name: str, stop: int, needed: str) -> list[int]:
    if not isinstance(values, list):
        raise InputError(f"{name} must be a list of whole numbers, got {_shown(values)}")
    for place, value in enumerate(values):
        if type(value) is not int or not 0 <= value < stop:
            raise InputError(f"{name}[{place}] must be {needed}, got {_shown(value)}")
    return values


def _bounded_int(digits: str) -> int | float:
    return int(digits) if len(digits) < 20 else float(digits)


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
