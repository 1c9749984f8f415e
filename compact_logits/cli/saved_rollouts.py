"""Rollouts as slime saves them (`--save-debug-rollout-data`): a file of `torch.save`, whose pickle is not run."""

from __future__ import annotations

import os
import re
import stat
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compact_logits.cli.rollouts import Rollout, checked_rollout, read_rollouts
from compact_logits.errors import InputError

__all__ = ["MAX_FILE_BYTES", "MAX_TOKENS", "read_any_rollouts"]

MAX_FILE_BYTES = 8 * 2**30
MAX_TOKENS = 2**24  # of one trajectory

_ZIP = b"PK\x03\x04"


def read_any_rollouts(path: str | Path, *, vocab: int) -> list[Rollout]:
    """Read the rollouts of a JSONL file, or of a file that slime saved; which of them it is, its first bytes say.

    Of a saved sample are taken `tokens`, `response_length`, `loss_mask` (all ones where it is `None`, as slime has it)
    and `remove_sample` (then all zeros). Only tensors and plain values are loaded: a pickle that would call anything is
    refused by torch and named here. Raises `InputError`, in one line, as `read_rollouts` does.
    """
    try:
        head = b""
        # A pipe is opened once, by who reads it: its bytes are there once. And torch saves into files.
        if stat.S_ISREG(os.stat(path).st_mode):
            with open(path, "rb") as file:
                head = file.read(4)
    except OSError as error:
        raise InputError(f"needed a readable file of rollouts, got {path}: {error.strerror}") from None
    if head == _ZIP:
        return _read_saved(path, vocab)
    if head[:1] == b"\x80":
        raise InputError(f"{path}: needed JSONL or a zip file of torch.save, got a bare pickle, which is not opened")
    return read_rollouts(path, vocab=vocab)


def _read_saved(path: str | Path, vocab: int) -> list[Rollout]:
    _check_archive(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols that slime does not write
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # A damaged or hostile archive makes torch's reader raise almost anything.
        raise InputError(f"{path}: needed tensors and plain values as slime saves them, {_told(error)}") from None
    samples = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(samples, list) or not samples:
        raise InputError(f"{path}: needed a dict with a list of samples, as slime saves, got something else or none")
    rollouts = []
    for number, sample in enumerate(samples):
        try:
            rollouts.append(_rollout(sample, vocab))
        except InputError as error:
            raise InputError(f"{path}: sample {number}: {error}") from None
    return rollouts


def _check_archive(path: str | Path) -> None:
    """`torch.save` stores without compression: what unpacks to more than its own size is no file of it."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise InputError(f"{path}: needed a whole zip file of torch.save, got one that is damaged: {error}") from None
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise InputError(f"{path}: needed a zip file of torch.save, which does not compress, got a compressed one")
    total = sum(entry.file_size for entry in entries)
    if total > min(MAX_FILE_BYTES, Path(path).stat().st_size):
        raise InputError(f"{path}: needed at most {MAX_FILE_BYTES} bytes, all in the file, got entries of {total}")


def _rollout(sample: Any, vocab: int) -> Rollout:
    if not isinstance(sample, dict):
        raise InputError(f"needed a dict of its fields, got a {type(sample).__name__}")
    record = {key: _plain(sample[key], key) for key in ("tokens", "response_length", "loss_mask") if key in sample}
    length = record.get("response_length")
    if type(length) is int and 0 <= length <= MAX_TOKENS:
        if sample.get("remove_sample") is True:
            record["loss_mask"] = [0] * length
        elif record.get("loss_mask") is None:
            record["loss_mask"] = [1] * length
    elif record.get("loss_mask") is None:
        record["loss_mask"] = []  # so that the length is what is found wrong
    return checked_rollout(record, vocab)


def _plain(value: Any, name: str) -> Any:
    """A tensor of whole numbers as a list; other values as they are, for `checked_rollout` to look at."""
    if not isinstance(value, Tensor):
        return value
    # Looked at before it is turned into a list: a tensor of few bytes may claim any shape.
    whole = not value.is_floating_point() and not value.is_complex()
    if value.layout != torch.strided or value.device.type != "cpu" or value.dim() != 1 or not whole:
        raise InputError(f"{name} must be one row of whole numbers, got a tensor {tuple(value.shape)} of {value.dtype}")
    if value.numel() > MAX_TOKENS:
        raise InputError(f"{name} must have at most {MAX_TOKENS} entries, got {value.numel()}")
    return value.long().tolist()


def _told(error: Exception) -> str:
    """What torch found, without its advice to load the file in the unsafe way."""
    text = "".join(each if each.isprintable() else " " for each in str(error))
    if named := re.search(r"GLOBAL ([\w.]+)", text):
        return (
            f"got one that calls for {named[1][:80]}, which is not run; save it again without such objects, or as "
            f"JSONL with tokens, loss_mask and response_length"
        )
    return f"got a damaged file: {type(error).__name__}: {' '.join(text.split())[:160]}"
