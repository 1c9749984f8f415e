"""`compact-logits bench`: time and memory of the head by every way that is here, after a gate, and the floor."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from compact_logits.cli.bench_case import Case
from compact_logits.cli.bench_peers import ROOTS, find_peers
from compact_logits.cli.bench_plot import plot
from compact_logits.cli.bench_report import as_json, environment, print_outcome
from compact_logits.cli.bench_run import Outcome, run_case
from compact_logits.cli.pictures import check_plot
from compact_logits.cli.tables import need_rich
from compact_logits.config import parse_bytes
from compact_logits.engine.slices import default_budget
from compact_logits.errors import ConfigError

__all__ = ["add_arguments", "run"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_MOST = {"tokens": 2**24, "hidden": 2**18, "vocab": 2**24, "rounds": 10_000}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.epilog = (
        "Peers that are installed (megatron-core, trl, cut-cross-entropy) take part; checkouts are named by "
        f"{', '.join(ROOTS)}."
    )
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="rows of the micro-batch (%(default)s)")
    parser.add_argument(
        "--density", type=float, nargs="+", default=[0.25], metavar="X", help="parts of the rows that count (0.25)"
    )
    parser.add_argument("--hidden", type=int, default=512, metavar="N", help="size of a hidden state (%(default)s)")
    parser.add_argument("--vocab", type=int, default=16384, metavar="N", help="ids of this rank (%(default)s)")
    parser.add_argument("--dtype", default="fp32", choices=sorted(_DTYPES), help="of weight and hidden states (fp32)")
    parser.add_argument("--entropy", default="none", choices=("none", "metric", "loss"), help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of time, interleaved (%(default)s)")
    parser.add_argument(
        "--budget",
        nargs="+",
        metavar="SIZE",
        help="bytes of logits that ours may hold, one line each (the device's default and 8MiB)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one, unless named")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch on the CPU")
    parser.add_argument(
        "--thread-time",
        action="store_true",
        help="count the CPU time of one thread, which other processes on the machine hardly disturb",
    )
    parser.add_argument("--no-peers", action="store_true", help="the full path, ours, plain torch and the floor alone")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw time and memory against density there too")


def run(args: argparse.Namespace) -> int:
    """Return 0, or 1 where the full path or one of ours failed the gate.

    Raises `ConfigError` for what cannot be used.
    """
    cases = _cases(args)
    budgets = _budgets(args, cases[0].device)
    if args.plot is not None:
        check_plot(args.plot)
    if not args.json:
        need_rich("bench")
    threads = 1 if args.thread_time else args.threads
    if threads is not None:
        torch.set_num_threads(threads)
    clock = time.thread_time if args.thread_time else time.perf_counter
    peers = [] if args.no_peers else find_peers(os.environ)
    outcomes: list[Outcome] = []
    for case in cases:
        with _progress(f"density {case.density:g}", quiet=args.json) as advance:
            outcomes.append(run_case(case, peers, budgets, args.rounds, advance, clock))
        if not args.json:
            print_outcome(outcomes[-1])
    known = {**environment(cases[0].device), "clock": "one thread's CPU time" if args.thread_time else "wall"}
    if args.json:
        print(json.dumps(as_json(outcomes, args.rounds, known), indent=2))
    else:
        print("; ".join([f"medians of {args.rounds} rounds", *[f"{key} {value}" for key, value in known.items()]]))
    if args.plot is not None:
        plot(outcomes, args.plot)
    needed = [way for outcome in outcomes for way in outcome.ways if way.view in ("ours", "full path")]
    return int(any(way.failure for way in needed))


def _cases(args: argparse.Namespace) -> list[Case]:
    for name, most in _MOST.items():
        value = getattr(args, name)
        if not 1 <= value <= most:
            raise ConfigError(f"--{name} must be from 1 to {most}, got {value}")
    if args.threads is not None and not 1 <= args.threads <= 1024:
        raise ConfigError(f"--threads must be from 1 to 1024, got {args.threads}")
    for density in args.density:
        if not 0 < density <= 1:
            raise ConfigError(f"--density must be above 0 and at most 1, got {density:g}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a GPU that torch can use, and there is none")
    if args.thread_time and (args.threads or 1) > 1:
        raise ConfigError(f"--thread-time counts one thread, got --threads {args.threads}")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.thread_time and device != "cpu":
        raise ConfigError("--thread-time counts a CPU's thread; name --device cpu with it")
    return [
        Case(
            tokens=args.tokens,
            density=density,
            hidden=args.hidden,
            vocab=args.vocab,
            dtype=_DTYPES[args.dtype],
            entropy=args.entropy,
            device=torch.device(device),
        )
        for density in args.density
    ]


def _budgets(args: argparse.Namespace, device: torch.device) -> list[int]:
    if args.budget is None:
        return [default_budget(device), 8 * 2**20]
    try:
        return [parse_bytes(text) for text in args.budget]
    except ConfigError as error:
        raise ConfigError(f"--budget: {error}") from None


@contextmanager
def _progress(what: str, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """A spinner on stderr that counts; nothing if `quiet`."""
    if quiet:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}, step {task.completed}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda: progress.advance(task)
