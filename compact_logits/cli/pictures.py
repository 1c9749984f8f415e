"""PNG files of `--plot`: whether one can be made, before the work is done, and saving it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from compact_logits.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COMPACT", "FULL", "RULE", "check_plot", "save"]

FULL = "#c44e52"
COMPACT = "#2a6fb0"
RULE = "#555555"


def check_plot(path: Path) -> None:
    """Raise `ConfigError` where no picture can be made at `path`."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot draws with matplotlib, which is not installed: pip install 'compact-logits[cli]'")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot must name a .png file, got {path}")
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigError(f"--plot must name a file in a folder that exists, got {path}")


def save(figure: Figure, path: Path) -> None:
    """Write the PNG. Raises `ConfigError` where it cannot be written."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot cannot write {path}: {error.strerror}") from None
