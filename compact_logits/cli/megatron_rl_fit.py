"""Print the largest Megatron-RL micro-batch that fits a given memory, on the gathered and on the compact path."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import torch

from compact_logits.config import parse_bytes
from compact_logits.errors import CompactLogitsError
from compact_logits.integrations.megatron_rl.fit import Path, Policy, head_bytes, largest_micro_batch

__all__ = ["main"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_PATHS: tuple[Path, ...] = ("gathered", "compact")


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 2 where the sizes make no head; then one line on stderr says why."""
    args = _parser().parse_args(argv)
    try:
        policy = Policy(
            vocab=args.vocab,
            hidden=args.hidden,
            sequence=args.sequence,
            tp=args.tp,
            sequence_parallel=not args.no_sequence_parallel,
            dtype=_DTYPES[args.dtype],
            fused=not args.unfused,
            density=args.density,
            chunk_bytes=None if args.chunk_bytes is None else parse_bytes(args.chunk_bytes),
        )
        memory = parse_bytes(args.memory)
        rest = 0 if args.bytes_per_sequence is None else parse_bytes(args.bytes_per_sequence)
        found = {}
        for path in _PATHS:
            largest = largest_micro_batch(policy, path, memory, bytes_per_sequence=rest)
            peak = head_bytes(policy, max(largest, 1), path).peak + max(largest, 1) * rest
            found[path] = {"micro_batch": largest, "peak_bytes": peak}
    except CompactLogitsError as error:
        print(f"megatron_rl_fit: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"memory_bytes": memory, **found}))
        return 0
    print(f"largest micro-batch of {args.sequence:,} positions that fits {memory / 2**30:.2f} GiB, head and back:")
    for name, each in found.items():
        size = f"{each['peak_bytes'] / 2**30:.2f} GiB"
        said = f"peak {size}" if each["micro_batch"] else f"one alone takes {size}"
        print(f"  {name:9} {each['micro_batch']:5,}   {said}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron_rl_fit", description=__doc__)
    parser.add_argument("--vocab", type=int, required=True, help="padded vocabulary size of all ranks")
    parser.add_argument("--hidden", type=int, required=True, help="hidden size")
    parser.add_argument("--sequence", type=int, required=True, help="positions of a sequence on one CP rank")
    parser.add_argument("--memory", required=True, help="bytes that are free for the head, or 40GiB")
    parser.add_argument("--bytes-per-sequence", help="what the layers below hold of each sequence")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--no-sequence-parallel", action="store_true")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bf16")
    parser.add_argument("--unfused", action="store_true", help="no gradient accumulation fusion")
    parser.add_argument("--density", type=float, default=1.0, help="share of the log-probs that count, 0 to 1")
    parser.add_argument("--chunk-bytes", help="COMPACT_LOGITS_CHUNK_BYTES, 1GiB if not given")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
