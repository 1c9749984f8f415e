"""Time and memory of torchforge's log-probs: gathered, with loss_parallel, and ours, side by side in one run."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from compact_logits.cli.launch import RankFailed, launch
from compact_logits.cli.torchforge_rank import Measured, Sizes, bench_rank
from compact_logits.cli.torchforge_seed import SEED_CASE, Simulated, simulate_ways

__all__ = ["main"]

_SIZES = {"ranks": 2, "batch": 2, "prompt": 64, "response": 448, "vocab": 32768, "hidden": 256, "rounds": 5}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return 0, or 1 where a way of ours failed the gate or a rank failed."""
    args = _parser().parse_args(argv)
    if args.seed_case:
        ways = [asdict(way) for way in _print_seed(args.root)]
        record: dict[str, Any] = {"case": {**asdict(SEED_CASE), "ranks": 2}, "ways": ways}
        failed = False
    else:
        named = {field.name: getattr(args, field.name) for field in fields(Sizes) if hasattr(args, field.name)}
        sizes = Sizes(**{**named, "dtype": _DTYPES[args.dtype], "training": not args.forward_only})
        # In torch 2.13 a compiled loss_parallel from the cache on disk gives wrong numbers; the ranks inherit this.
        os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
        try:
            ranks: list[list[Measured]] = launch(args.ranks, bench_rank, sizes, args.root, not args.uncompiled_only)
        except RankFailed as error:
            print(f"torchforge_bench: {error}", file=sys.stderr)
            return 1
        measured = [_slowest(each) for each in zip(*ranks, strict=True)]
        _print_measured(measured, sizes)
        record = {"case": {**asdict(sizes), "ranks": args.ranks}, "ways": [asdict(each) for each in measured]}
        failed = any(each.failure for each in measured if each.name.startswith("ours"))
    source = "torchforge's own function" if args.root else "torchforge's definition (no TORCHFORGE_ROOT)"
    environment = _environment()
    print(f"\n{source}; {'; '.join(f'{key} {value}' for key, value in environment.items())}")
    if args.json:
        args.json.write_text(json.dumps({**environment, **record}, default=str, indent=1) + "\n")
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchforge_bench", description=__doc__)
    for name, value in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="fp32")
    parser.add_argument("--forward-only", action="store_true", help="as a reference model: no backward")
    parser.add_argument("--uncompiled-only", action="store_true", help="leave out torchforge's own function, compiled")
    parser.add_argument("--seed-case", action="store_true", help="simulate batch 4, 9k tokens, V=151,936, TP=2 instead")
    parser.add_argument("--json", type=Path, help="write the numbers there too")
    parser.add_argument("--root", default=os.environ.get("TORCHFORGE_ROOT", ""), help="torchforge checkout")
    return parser


def _slowest(ranks: Sequence[Measured]) -> Measured:
    """Of one way: the failure of a rank that has one, else the longest time and the highest peak."""
    slowest = max(ranks, key=lambda each: (bool(each.failure), each.time_ms))
    return replace(slowest, peak_mib=max(each.peak_mib for each in ranks))


def _print_measured(found: list[Measured], sizes: Sizes) -> None:
    what = "forward and backward" if sizes.training else "forward alone"
    print(
        f"{sizes.batch} x {sizes.prompt + sizes.response} positions, {sizes.response} scored, V {sizes.vocab}, "
        f"H {sizes.hidden}, {str(sizes.dtype).removeprefix('torch.')}, {what} from hidden states; slowest rank\n"
    )
    print("| way | compiled | time_ms | peak_mib | error |\n|---|---|---|---|---|")
    for each in found:
        numbers = each.failure or f"{each.time_ms:.0f} | {each.peak_mib:.0f} | {max(each.errors):.0e}"
        print(f"| {each.name} | {'yes' if each.compiled else 'no'} | {numbers} |" + (" | |" if each.failure else ""))


def _print_seed(root: str) -> list[Simulated]:
    found = simulate_ways(SEED_CASE, 2, root)
    print(
        "4 x 9216 positions, 8192 scored, V 151,936, H 2048, bf16, TP 2, by simulation: GB of one rank beyond hidden "
        "states and weight\n"
    )
    print("| way | forward_gb | forward_backward_gb |\n|---|---|---|")
    for each in found:
        print(f"| {each.name} | {each.forward / 1e9:.2f} | {each.training / 1e9:.2f} |")
    return found


def _environment() -> dict[str, str]:
    root = Path(__file__).parents[2]
    commit = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit or "unknown",
        "date": datetime.date.today().isoformat(),
    }


if __name__ == "__main__":
    sys.exit(main())
