"""`compact-logits demo`: train a small GPTModel on both paths, without a GPU or a network, and compare them."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from compact_logits.cli.demo_rank import Job, RankOutcome, run_rank
from compact_logits.cli.launch import launch
from compact_logits.cli.pictures import check_plot
from compact_logits.cli.report import Report
from compact_logits.cli.rollouts import SHIPPED, pack_rollouts, read_rollouts
from compact_logits.cli.training import Settings
from compact_logits.config import parse_bytes
from compact_logits.errors import ConfigError

__all__ = ["add_arguments", "run"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_VOCAB_RANGE = (4096, 2**20)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument(
        "--rollouts",
        type=Path,
        default=SHIPPED,
        metavar="FILE",
        help="JSONL, one trajectory a line with tokens, loss_mask and response_length (default: the file shipped)",
    )
    parser.add_argument("--steps", type=int, default=3, help="optimiser steps of each path (default: %(default)s)")
    parser.add_argument("--tp", type=int, default=2, choices=(1, 2, 4), help="tensor-parallel ranks, a process each")
    parser.add_argument("--dtype", default="fp32", choices=sorted(_DTYPES), help="of weights and hidden states")
    parser.add_argument("--vocab", type=int, default=8192, help="size of the vocabulary (default: %(default)s)")
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=2560, metavar="N", help="tokens of a micro-batch at most"
    )
    parser.add_argument(
        "--chunk-bytes", default="1MiB", metavar="SIZE", help="of logits the compact path holds (default: %(default)s)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw losses and the largest logits held")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Return 0 where the two paths agree and 1 where they do not.

    Raises `ConfigError` and `InputError` for what cannot be used, and `RankFailed` for a run that broke.
    """
    job = _job(args)
    if importlib.util.find_spec("megatron") is None:
        raise ConfigError("the demo trains a megatron-core GPTModel, which is not installed: pip install megatron-core")
    if not args.json and importlib.util.find_spec("rich") is None:
        raise ConfigError("the demo draws with rich, which is not installed: pip install 'compact-logits[cli]'")
    if args.plot is not None:
        check_plot(args.plot)
    passes = 2 * (1 + len(job.batches) * (job.settings.steps + 1))
    with _progress(passes, quiet=args.json) as advance:
        report = Report(job, _run_ranks(args.tp, job, advance))
    if args.plot is not None:
        from compact_logits.cli.demo_plot import plot

        plot(report, args.plot)
    if args.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        from rich.console import Console

        Console().print(report.as_table())
        print(report.verdict(), file=sys.stdout if report.passed else sys.stderr)
    return 0 if report.passed else 1


def _run_ranks(world: int, job: Job, advance: Callable[[], None]) -> list[RankOutcome]:
    return launch(world, run_rank, job, on_progress=advance)


def _job(args: argparse.Namespace) -> Job:
    if not 1 <= args.steps <= 1000:
        raise ConfigError(f"--steps must be from 1 to 1000, got {args.steps}")
    low, high = _VOCAB_RANGE
    if not low <= args.vocab <= high or args.vocab % args.tp:
        raise ConfigError(f"--vocab must be from {low} to {high} and a multiple of --tp {args.tp}, got {args.vocab}")
    if args.micro_batch_tokens < 1:
        raise ConfigError(f"--micro-batch-tokens must be positive, got {args.micro_batch_tokens}")
    try:
        chunk_bytes = parse_bytes(args.chunk_bytes)
    except ConfigError as error:
        raise ConfigError(f"--chunk-bytes: {error}") from None
    rollouts = read_rollouts(args.rollouts, vocab=args.vocab)
    return Job(
        batches=pack_rollouts(rollouts, token_budget=args.micro_batch_tokens),
        vocab=args.vocab,
        dtype=_DTYPES[args.dtype],
        settings=Settings(steps=args.steps, chunk_bytes=chunk_bytes),
    )


@contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """A bar on stderr that moves by one at each call; nothing if `quiet`."""
    if quiet:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("full path, then compact path", total=total)
        yield lambda: progress.advance(task)
