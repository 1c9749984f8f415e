"""`compact-logits doctor`: what is installed, which seam and kernels are used, what is on, off or refused, and why."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from compact_logits.cli.diagnosis import Diagnosis
from compact_logits.cli.environment import find_diagnostics, find_kernels, find_seam, find_versions, read_setting
from compact_logits.cli.launch_flags import read_flags
from compact_logits.cli.launch_script import Launch, read_arguments, read_launch_script
from compact_logits.cli.slime_recipe import decide
from compact_logits.cli.tables import need_rich
from compact_logits.errors import ConfigError
from compact_logits.host_values import describe
from compact_logits.integrations import INTEGRATIONS

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument(
        "integrations",
        nargs="*",
        metavar="INTEGRATION",
        help=f"look at these alone: {', '.join(INTEGRATIONS)} (default: all)",
    )
    parser.add_argument(
        "--slime",
        metavar="ARGS_OR_SCRIPT",
        help="decide a slime recipe: a bash launch script, or its arguments in one quoted word (--slime='--use-opd')",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Return 1 where something is refused that is switched on: an integration with `COMPACT_LOGITS` set, a recipe, or,
    with `COMPACT_LOGITS=strict`, the Triton kernels.

    Raises `ConfigError` and `InputError` for what cannot be used.
    """
    unknown = [name for name in args.integrations if name not in INTEGRATIONS]
    if unknown:
        raise ConfigError(f"needed integrations among {', '.join(INTEGRATIONS)}, got {describe(unknown[0])}")
    if not args.json:
        need_rich("doctor")
    setting = read_setting(os.environ)
    launch = recipe = None
    if args.slime is not None:
        launch = _launch(args.slime)
        recipe = decide(read_flags(launch), strict=setting.config is not None and setting.config.mode == "strict")
    diagnosis = Diagnosis(
        versions=find_versions(),
        seam=find_seam(),
        setting=setting,
        kernels=find_kernels(),
        integrations=find_diagnostics(tuple(args.integrations) or (INTEGRATIONS if recipe is None else ("slime",))),
        launch=launch,
        recipe=recipe,
    )
    if args.json:
        print(json.dumps(diagnosis.as_json(), indent=2))
    else:
        diagnosis.print_tables()
    return 1 if diagnosis.refused else 0


def _launch(text: str) -> Launch:
    """A path of a file that exists, or of what looks like one, is a script; everything else an argument string."""
    if not text.strip():
        raise ConfigError("--slime needs a launch script or its arguments, got an empty text")
    looks_like_path = not any(character.isspace() for character in text.strip()) and not text.startswith("-")
    try:
        is_file = Path(text).exists()
    except (OSError, ValueError):  # too long for a path, or with a null character in it
        is_file = False
    return read_launch_script(Path(text)) if is_file or looks_like_path else read_arguments(text)
