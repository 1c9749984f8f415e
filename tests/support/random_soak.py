"""Many random micro-batches against the dense definition: draw, run on ranks, compare, count, report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings

from tests.support.random_check import mismatches
from tests.support.random_data import kept_rows
from tests.support.random_example import Example, examples
from tests.support.random_run import Part, run_on_ranks
from tests.support.ranks import RankError, RankPool

__all__ = ["check", "draw", "main", "soak"]

ALL = list(HealthCheck)
BATCH = 40
# How many mismatches are reported in full.
REPORTED = 5

RunOnRanks = Callable[[int, int, list[Example]], list[list[Part]]]


def draw(count: int, seed: int) -> Iterator[Example]:
    """`count` different examples, the same ones for the same seed and version of hypothesis."""
    drawn: dict[Example, None] = {}

    @settings(max_examples=count, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=ALL)
    @given(examples())
    def collect(example: Example) -> None:
        drawn[example] = None

    while len(drawn) < count:
        # What hypothesis takes for different may be the same for us, so one round can fall short.
        hypothesis.seed(seed + len(drawn))(collect)()
    return islice(drawn, count)


def check(pool: RankPool, batch: list[Example], run: RunOnRanks = run_on_ranks) -> list[list[str]]:
    """What is wrong with each example of a batch, all of one world size."""
    world = batch[0].world
    try:
        answers = [run(0, 1, batch)] if world == 1 else pool.run(world, run, batch, timeout=300)
    except (RankError, RuntimeError, TypeError, ValueError):
        if len(batch) == 1:
            return [[traceback.format_exc()]]
        return [check(pool, [example], run)[0] for example in batch]
    return [
        mismatches(example, _by_place(example, [answers[rank][index] for rank in range(world)]))
        for index, example in enumerate(batch)
    ]


def _by_place(example: Example, answers: list[list[Part]]) -> list[list[Part]]:
    """From parts by rank to parts by tensor-parallel and context-parallel rank."""
    if not example.spread:
        return answers
    return [[answers[cp * example.tp + tp][0] for cp in range(example.cp)] for tp in range(example.tp)]


def soak(
    count: int, seed: int, pool: RankPool, say: Callable[[str], None], run: RunOnRanks = run_on_ranks
) -> dict[str, Any]:
    """The counts of a soak. Each mismatch is reported with the example, so that it can be run again by itself."""
    begin = last = time.monotonic()
    waiting: dict[int, list[Example]] = {}
    kinds: dict[str, Counter[str]] = {
        name: Counter() for name in ("world", "cp", "sequence_parallel", "layout", "dtype", "scorer", "given")
    }
    done = rows = empty = wrong = 0

    def finish(batch: list[Example]) -> None:
        nonlocal done, wrong, last
        for example, found in zip(batch, check(pool, batch, run), strict=True):
            done += 1
            if found:
                wrong += 1
                if wrong <= REPORTED:
                    say(f"mismatch: {'; '.join(found)}\n  tools/soak --example '{example.dumps()}'")
        if time.monotonic() - last > 10:
            last = time.monotonic()
            say(f"{done} of {count} examples, {wrong} mismatches, {last - begin:.0f} s")

    for example in draw(count, seed):
        for name, counter in kinds.items():
            counter[str(getattr(example, name))] += 1
        kept = len(kept_rows(example))
        rows, empty = rows + kept, empty + (kept == 0)
        batch = waiting.setdefault(example.world, [])
        batch.append(example)
        if len(batch) == BATCH:
            finish(waiting.pop(example.world))
    for batch in waiting.values():
        finish(batch)
    return {
        "examples": done,
        "mismatches": wrong,
        "seed": seed,
        "rows_compared": rows,
        "examples_without_rows": empty,
        "time_s": round(time.monotonic() - begin, 1),
        **{name: dict(sorted(counter.items())) for name, counter in kinds.items()},
    }


def circumstances() -> dict[str, Any]:
    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], capture_output=True, text=True, cwd=Path(__file__).parent)
        return done.stdout.strip()

    processor = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
        + (f", {processor[0].split(':')[1].strip()}" if processor else ""),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hypothesis": hypothesis.__version__,
        "commit": git("rev-parse", "HEAD") or "unknown",
        "changed_files": len(git("status", "--porcelain", "--untracked-files=no").splitlines()),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def main(arguments: list[str] | None = None, run: RunOnRanks = run_on_ranks) -> int:
    """0 where everything agrees with the definition, 1 where something does not."""
    parser = argparse.ArgumentParser(prog="tools/soak", description=__doc__)
    parser.add_argument("--examples", type=int, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, help="default: a new one, printed")
    parser.add_argument("--example", help="one example, as a mismatch was reported, instead of random ones")
    parser.add_argument("--report", type=Path, help="a JSON file for the report, which is printed as well")
    given_ = parser.parse_args(arguments)
    torch.set_num_threads(1)
    pool = RankPool()
    try:
        if given_.example is not None:
            (found,) = check(pool, [Example.loads(given_.example)], run)
            print("\n".join(found) or "as the definition says", flush=True)
            return bool(found)
        seed = int.from_bytes(os.urandom(4), "big") if given_.seed is None else given_.seed
        print(f"seed {seed}", flush=True)
        result = soak(given_.examples, seed, pool, lambda text: print(text, flush=True), run)
    finally:
        pool.close()
    report = json.dumps(result | circumstances(), indent=2)
    print(report, flush=True)
    if given_.report is not None:
        given_.report.write_text(report + "\n")
    return bool(result["mismatches"])


if __name__ == "__main__":
    sys.exit(main())
