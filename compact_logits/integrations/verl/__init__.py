"""verl's Megatron top-k distillation. As a plugin: the entry point `plugin` in the group `verl.plugins`, which this
package declares, so that every process that imports verl installs it; without: call `install()`."""

from __future__ import annotations

import importlib.util
import os
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING

from compact_logits.config import Config
from compact_logits.diagnostics import Diagnostic
from compact_logits.errors import PatchError

if TYPE_CHECKING:
    from compact_logits.integrations.verl.installation import Installation

__all__ = ["SUPPORTED", "check", "install", "uninstall"]

SUPPORTED = ("verl 1dda039b9 and 0.9.1 with strategy=megatron, on megatron-core 0.16 to 0.19",)

_installation: Installation | None = None
_cancel: Callable[[], None] | None = None  # of an installation that waits for verl's Megatron engine


def install(args: Namespace | None = None) -> None:
    """Switch the compact top-k KL on in this process, if `COMPACT_LOGITS` says so; with it unset nothing changes.

    `args` is not read: verl's settings reach the loss with every call. Installing twice is installing once.
    Raises `ConfigError` for an unknown setting and `PatchError` for a version of verl that is not the proven one.
    """
    global _installation
    config = Config.from_env(os.environ)
    if not config.enabled or _installation is not None:
        return
    from compact_logits.integrations.verl.installation import Installation

    installation = Installation(config)
    installation.apply()
    _installation = installation


def uninstall() -> None:
    """Put every replaced function back; nothing happens where nothing was installed.

    Raises `PatchError` where somebody else has patched on top.
    """
    global _installation, _cancel
    if _cancel is not None:
        _cancel()
        _cancel = None
    if _installation is not None:
        _installation.revert()
        _installation = None


def check() -> list[Diagnostic]:
    """What is on, off or refused in this process, and why. Changes nothing and installs nothing."""
    config = Config.from_env(os.environ)
    if _installation is not None:
        proven = f"proven: {'; '.join(SUPPORTED)}"
        found = [Diagnostic("verl", "on", f"installed, COMPACT_LOGITS={config.mode}")]
        if _installation.tail_mode.native:
            reason = "this verl has a loss mode forward_kl_topk_tail of its own, which keeps its own path"
            found.append(Diagnostic("verl forward_kl_topk_tail", "refused", reason, proven))
        return found
    if importlib.util.find_spec("verl") is None:
        return [Diagnostic("verl", "off", "verl is not on this Python's path", "run this where verl is installed")]
    if not config.enabled:
        return [Diagnostic("verl", "off", "COMPACT_LOGITS is unset or 0", "export COMPACT_LOGITS=1")]
    try:
        from compact_logits.integrations.verl.installation import Installation

        Installation(config)
    except (ImportError, PatchError) as error:
        return [Diagnostic("verl", "refused", str(error), f"proven: {'; '.join(SUPPORTED)}")]
    remedy = "leave VERL_USE_EXTERNAL_PLUGINS at auto, or call compact_logits.integrations.verl.install()"
    return [Diagnostic("verl", "off", "not installed in this process", remedy)]


def __getattr__(name: str) -> object:
    """`plugin`, the object of the entry point: loading it requests the installation, importing the module does not."""
    global _cancel
    if name != "plugin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from compact_logits.integrations.verl.deferred import install_after

    if _cancel is None and _installation is None:
        _cancel = install_after(install)
    return install
