"""`compact-logits plan`: the head's peak memory on both paths, by running its code on tensors without memory."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from compact_logits.cli.plan_report import PlanReport
from compact_logits.cli.planning import Plan, head_of_tokens, make_plan, padded, plan_of_rollouts
from compact_logits.cli.presets import PRESETS, Preset, find_preset
from compact_logits.cli.saved_rollouts import read_any_rollouts
from compact_logits.cli.tables import need_rich
from compact_logits.config import parse_bytes
from compact_logits.errors import ConfigError
from compact_logits.memory import HeadSize

__all__ = ["add_arguments", "run"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_TOKENS, _DENSITY = 32768, 0.2
_MOST = {
    "vocab": 2**24,
    "hidden": 2**18,
    "vocab_multiple": 2**16,
    "tp": 256,
    "cp": 256,
    "tokens": 2**24,
    "kept": 2**24,
    "micro_batch_tokens": 2**24,
    "nucleus_ids": 4096,
    "top_k": 4096,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    model = parser.add_argument_group("model")
    names = ", ".join(preset.name for preset in PRESETS)
    model.add_argument("--preset", metavar="NAME", help=f"vocabulary and hidden size of one of {names}")
    model.add_argument("--vocab", type=int, metavar="N", help="size of the vocabulary, before Megatron pads it")
    model.add_argument("--hidden", type=int, metavar="N", help="size of a hidden state")
    model.add_argument(
        "--vocab-multiple", type=int, metavar="N", help="Megatron's --make-vocab-size-divisible-by (128)"
    )
    model.add_argument("--tied", action=argparse.BooleanOptionalAction, help="the head's weight is the embedding's")
    model.add_argument("--dtype", default="bf16", choices=sorted(_DTYPES), help="of weights and hidden states")
    model.add_argument("--frozen", action="store_true", help="the head is not trained")
    model.add_argument(
        "--fused",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="gradient accumulation fusion: the weight's gradient goes into the buffer that is there (default)",
    )
    layout = parser.add_argument_group("layout")
    layout.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel size")
    layout.add_argument(
        "--sp", action=argparse.BooleanOptionalAction, default=True, help="sequence parallelism where --tp is over 1"
    )
    layout.add_argument("--cp", type=int, default=1, metavar="N", help="context-parallel size")
    layout.add_argument("--allgather-cp", action="store_true", help="contiguous slices in place of a zigzag (slime's)")
    work = parser.add_argument_group("micro-batch")
    work.add_argument("--tokens", type=int, metavar="N", help=f"of one micro-batch, over all CP ranks ({_TOKENS})")
    work.add_argument("--density", type=float, metavar="X", help=f"share of tokens that count ({_DENSITY})")
    work.add_argument("--kept", type=int, metavar="N", help="tokens that count, in place of --density")
    work.add_argument(
        "--rollouts",
        type=Path,
        metavar="FILE",
        help="take real masks: JSONL with tokens, loss_mask and response_length, or slime's saved debug rollouts",
    )
    work.add_argument(
        "--micro-batch-tokens",
        type=int,
        metavar="N",
        help="tokens of a micro-batch at most, over all CP ranks: slime's --max-tokens-per-gpu times --cp",
    )
    score = parser.add_argument_group("what is computed")
    score.add_argument("--entropy", default="metric", choices=("none", "metric", "loss"), help="(default: %(default)s)")
    score.add_argument("--temperature", type=float, default=1.0, metavar="X", help="of the sampler")
    score.add_argument("--nucleus-ids", type=int, default=0, metavar="N", help="ids a row of a replayed top-p set")
    score.add_argument("--top-k", type=int, default=0, metavar="K", help="ids a row of a teacher: its KL, no log-probs")
    score.add_argument("--chunk-bytes", default=None, metavar="SIZE", help="of logits, on the compact path (1GiB)")
    card = parser.add_argument_group("card")
    card.add_argument("--memory", metavar="SIZE", help="of the card (80GiB): say what fits")
    card.add_argument("--reserved", metavar="SIZE", help="of it, what weights, optimizer and layers take")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw memory against tokens and density")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Return 0. Raises `ConfigError` and `InputError` for what cannot be used."""
    preset = _model(args)
    _check(args)
    if not args.json:
        need_rich("plan")
    if args.plot is not None:
        from compact_logits.cli.pictures import check_plot

        check_plot(args.plot)
    head = HeadSize(
        rows=args.tp,
        kept=0,
        vocab=padded(preset.vocab, preset.vocab_multiple * args.tp),
        hidden=preset.hidden,
        tp=args.tp,
        sequence_parallel=args.sp,
        dtype=_DTYPES[args.dtype],
        entropy=args.entropy,
        temperature=args.temperature,
        frozen=args.frozen,
        fused=args.fused,
        chunk_bytes=None if args.chunk_bytes is None else _bytes("--chunk-bytes", args.chunk_bytes),
        nucleus_ids=args.nucleus_ids,
        top_k=args.top_k,
    )
    plan = _plan(args, head, preset)
    report = PlanReport(plan, preset, cp=args.cp, memory=_memory(args))
    if args.plot is not None:
        from compact_logits.cli.plan_plot import plot

        plot(plan, args.cp, preset, args.plot)
    if args.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        report.print_tables()
        if args.plot is not None:
            print(f"drawn into {args.plot}")
    return 0


def _plan(args: argparse.Namespace, head: HeadSize, preset: Preset) -> Plan:
    memory = _memory(args)
    free = None if memory is None else memory[0] - memory[1]
    if args.rollouts is None:
        tokens = _TOKENS if args.tokens is None else args.tokens
        density = _DENSITY if args.density is None else args.density
        kept = round(density * tokens) if args.kept is None else args.kept
        if kept > tokens:
            raise ConfigError(f"--kept must be at most --tokens {tokens}, got {kept}")
        return make_plan(head_of_tokens(head, tokens, kept, args.cp), free)
    budget = _TOKENS if args.micro_batch_tokens is None else args.micro_batch_tokens
    return plan_of_rollouts(
        head,
        read_any_rollouts(args.rollouts, vocab=preset.vocab),
        token_budget=budget,
        cp=args.cp,
        allgather_cp=args.allgather_cp,
        free_bytes=free,
    )


def _model(args: argparse.Namespace) -> Preset:
    """The preset, changed by the flags that are given; or these alone."""
    given = {name: getattr(args, name) for name in ("vocab", "hidden", "vocab_multiple", "tied")}
    given = {name: value for name, value in given.items() if value is not None}
    if args.preset is not None:
        preset = find_preset(args.preset)
        changed = {name for name, value in given.items() if value != getattr(preset, name)}
        source = f"{preset.source}, but for {', '.join(sorted(changed))}" if changed else preset.source
        return replace(preset, **given, source=source)
    if "vocab" not in given or "hidden" not in given:
        raise ConfigError("needed --preset NAME, or --vocab and --hidden; --help lists the presets")
    return Preset(**{"name": "a model", "tied": False, "source": "the command line", **given})


def _check(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for a number out of range and for flags that exclude each other."""
    for name, most in _MOST.items():
        value, least = getattr(args, name), 0 if name in ("kept", "nucleus_ids", "top_k") else 1
        if value is not None and not least <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')} must be from {least} to {most}, got {value}")
    if args.density is not None and not 0.0 <= args.density <= 1.0:
        raise ConfigError(f"--density must be from 0 to 1, got {args.density}")
    if not 0.0 < args.temperature < float("inf"):
        raise ConfigError(f"--temperature must be positive and finite, got {args.temperature}")
    exclusive = [("kept", "density"), *[("rollouts", name) for name in ("tokens", "density", "kept")]]
    for one, other in exclusive:
        if getattr(args, one) is not None and getattr(args, other) is not None:
            raise ConfigError(f"--{one} and --{other} exclude each other; give one of them")
    if args.micro_batch_tokens is not None and args.rollouts is None:
        raise ConfigError("--micro-batch-tokens says how --rollouts are packed; without these, use --tokens")
    if args.nucleus_ids and args.top_k:
        raise ConfigError("--nucleus-ids and --top-k exclude each other; give one of them")
    if args.reserved is not None and args.memory is None:
        raise ConfigError("--reserved is part of --memory; give that too")


def _memory(args: argparse.Namespace) -> tuple[int, int] | None:
    """Bytes of the card and those that are reserved."""
    if args.memory is None:
        return None
    memory = _bytes("--memory", args.memory)
    reserved = 0 if args.reserved is None else _bytes("--reserved", args.reserved)
    if reserved >= memory:
        raise ConfigError(f"--reserved must be less than --memory {args.memory}, got {args.reserved}")
    return memory, reserved


def _bytes(flag: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None
