"""The command `compact-logits`. A subcommand is imported when it is called, not before."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from compact_logits.cli.launch import RankFailed
from compact_logits.errors import CompactLogitsError, ConfigError

__all__ = ["main"]

# Each module has `add_arguments(parser)` and `run(args) -> int`.
_COMMANDS = {
    "bench": "time and memory of the head by the full path, ours and the peers that are here, beside the floor",
    "demo": "train a small GPTModel on the full and on the compact path, on the CPU, and compare",
    "doctor": "say what is installed, which seam is used, and what is on, off or refused, and why",
    "plan": "say how much memory the head takes on both paths, and which micro-batch fits a card",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code: 0 for done, 1 for failed, 2 for used wrongly, 130 for interrupted.

    What goes wrong is said on stderr in one line.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="compact-logits", description="Log-probs of the rows that count, without the other logits.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    name = "compact-logits"
    try:
        for command, summary in _COMMANDS.items():
            subparser = subparsers.add_parser(command, help=summary, description=summary)
            if arguments[:1] == [command]:
                name = subparser.prog
                module = importlib.import_module(f"{__name__}.{command}")
                module.add_arguments(subparser)
                subparser.set_defaults(run=module.run)
        try:
            args = parser.parse_args(arguments)
            code: int = args.run(args)
        finally:
            # Here and not at exit, where Python would complain of a reader that has gone.
            sys.stdout.flush()
        return code
    except CompactLogitsError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except RankFailed as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read the output has enough. Python would flush it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.prog} --help lists what there is")
