"""Tables on the terminal, by rich, which comes with the extra `cli`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

from compact_logits.errors import ConfigError

__all__ = ["need_rich", "print_table", "printable"]


def need_rich(command: str) -> None:
    """Raise `ConfigError` where there is no rich to print with."""
    if importlib.util.find_spec("rich") is None:
        raise ConfigError(
            f"the {command} prints with rich, which is not installed: pip install 'compact-logits[cli]', or pass --json"
        )


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False, least_width: int = 0
) -> None:
    """Print a table; cells are text, never markup. `numbers`: all columns but the first are set to the right.
    `least_width`: of the page, where the terminal is narrower."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table: Any = Table(title=title, title_justify="left", title_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if numbers and place else "left", overflow="fold", no_wrap=not place)
    for row in rows:
        table.add_row(*[Text(printable(cell)) for cell in row])
    console = Console()
    console.width = max(console.width, least_width)
    console.print(table)


def printable(text: str) -> str:
    """Without control characters, which a script or a file may hold and a terminal obeys."""
    return "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text)
