"""slime's Megatron actor: `--custom-megatron-init-path compact_logits.integrations.slime.install`."""

from __future__ import annotations

import importlib.util
import os
from argparse import Namespace
from typing import TYPE_CHECKING

from compact_logits.config import Config
from compact_logits.diagnostics import Diagnostic
from compact_logits.errors import PatchError

if TYPE_CHECKING:
    from compact_logits.integrations.slime.installation import Installation

__all__ = ["SUPPORTED", "check", "install", "uninstall"]

SUPPORTED = ("slime 624b824a8 on Megatron-LM 1dcf0dafa8 (0.16.0rc0) with slime's own patch",)

_installation: Installation | None = None


def install(args: Namespace | None = None) -> None:
    """Switch the compact path on in this process, if `COMPACT_LOGITS` says so; with it unset nothing changes.

    `args`: the run's arguments, as slime passes them to `--custom-megatron-init-path`; a recipe that is not proven is
    then left alone, with the reason logged. Without them the first pass decides. A second call does nothing.

    Raises `ConfigError` for an unknown setting, `PatchError` for a version of slime or Megatron whose signatures are
    not the proven ones, and `RefusedError` where `COMPACT_LOGITS=strict` meets a recipe that is not proven.
    """
    global _installation
    config = Config.from_env(os.environ)
    if not config.enabled or _installation is not None:
        return
    from compact_logits.engine.kernels.verify import prove_on_all_ranks
    from compact_logits.integrations.slime.installation import Installation

    installation = Installation(config)
    if args is not None and not installation.decide(args):
        _installation = installation
        return
    prove_on_all_ranks(strict=config.mode == "strict")
    installation.patches.apply()
    _installation = installation


def uninstall() -> None:
    """Put every replaced function back; does nothing if nothing was installed.

    Raises `PatchError` where somebody else has patched on top.
    """
    global _installation
    if _installation is not None:
        _installation.patches.revert()
        _installation = None


def check() -> list[Diagnostic]:
    """What is on, off or refused in this process, and why. Changes nothing and installs nothing."""
    config = Config.from_env(os.environ)
    if _installation is not None:
        refused = _installation.refused or []
        if refused:
            return [Diagnostic("slime", "refused", str(refusal), refusal.remedy) for refusal in refused]
        return [Diagnostic("slime", "on", f"installed, COMPACT_LOGITS={config.mode}")]
    if importlib.util.find_spec("slime") is None:
        return [Diagnostic("slime", "off", "slime is not on this Python's path", "run this where slime is installed")]
    if not config.enabled:
        return [Diagnostic("slime", "off", "COMPACT_LOGITS is unset or 0", "export COMPACT_LOGITS=1")]
    try:
        from compact_logits.integrations.slime.installation import Installation

        Installation(config)
    except (ImportError, PatchError) as error:
        return [Diagnostic("slime", "refused", str(error), f"proven: {'; '.join(SUPPORTED)}")]
    remedy = "--custom-megatron-init-path compact_logits.integrations.slime.install"
    return [Diagnostic("slime", "off", "not installed in this process", remedy)]
