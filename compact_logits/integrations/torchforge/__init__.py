"""torchforge and torchtitan: log-probs over logits that are sharded on the vocabulary, or from hidden states.

`compute_logprobs` and `compute_logprobs_from_hidden` need neither of the two installed. `install`, in each process that
runs a torchforge actor, puts the first where the reference model and the losses look it up.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from compact_logits.config import Config
from compact_logits.errors import ConfigError, PatchError
from compact_logits.diagnostics import Diagnostic
from compact_logits.host_values import describe
from compact_logits.integrations.torchforge.hidden import compute_logprobs_from_hidden
from compact_logits.integrations.torchforge.logits import compute_logprobs

if TYPE_CHECKING:
    from compact_logits.integrations.torchforge.installation import Installation

__all__ = ["SUPPORTED", "check", "compute_logprobs", "compute_logprobs_from_hidden", "install", "uninstall"]

SUPPORTED = ("torchforge 6e77f0b3 (0.1.0, with torchmonarch 0.1.2 and torchtitan 0.2.0)",)

_installation: Installation | None = None


def install(args: Any = None) -> None:
    """Switch the compact path on in this process, if `COMPACT_LOGITS` says so; with it unset nothing changes.

    `args`: an actor or its configuration, of which `compile` is read: a bool, or something with a bool `enable`, as
    torchtitan has it; `compute_logprobs` is then called with it. Without, it is not compiled. Installing twice is
    installing once. A call whose logits are not laid out as `compute_logprobs` needs them goes to torchforge's own
    function, with the reason logged once; unless `COMPACT_LOGITS_CHECK_RANKS=0`, on every rank of the vocabulary's mesh
    axis if on one, and ranks of it that ask for different things raise `DisagreementError`.

    Raises `ConfigError` for an unknown setting or another `compile`, `PatchError` for a version of torchforge whose
    signatures are not the proven ones, `ImportError` where torchforge or what it needs is missing, and, with
    `COMPACT_LOGITS=strict`, `RefusedError` at a call that would go to torchforge's own function.
    """
    global _installation
    config = Config.from_env(os.environ)
    if not config.enabled or _installation is not None:
        return
    from compact_logits.integrations.torchforge.installation import Installation

    installation = Installation(config, compile=_asks_for_compilation(args))
    installation.patches.apply()
    _installation = installation


def uninstall() -> None:
    """Put every replaced function back; nothing happens where nothing was installed.

    Raises `PatchError` where somebody else has patched on top.
    """
    global _installation
    if _installation is not None:
        _installation.patches.revert()
        _installation = None


def check() -> list[Diagnostic]:
    """What is on, off or refused in this process, and why. Changes nothing and installs nothing."""
    name = "torchforge"
    if _installation is not None:
        refused = list(_installation.refused)
        if refused:
            return [Diagnostic(name, "refused", reason, "see the reason") for reason in refused]
        return [Diagnostic(name, "on", f"installed, mode {_installation.config.mode}")]
    config = Config.from_env(os.environ)
    if importlib.util.find_spec("forge") is None:
        return [Diagnostic(name, "off", "torchforge is not on this Python's path", "run this where it is installed")]
    if not config.enabled:
        return [Diagnostic(name, "off", "COMPACT_LOGITS is unset or 0", "export COMPACT_LOGITS=1")]
    try:
        from compact_logits.integrations.torchforge.installation import Installation

        Installation(config, compile=False)
    except (ImportError, PatchError) as error:
        return [Diagnostic(name, "refused", str(error), f"proven: {'; '.join(SUPPORTED)}")]
    return [Diagnostic(name, "off", "not installed in this process", f"call {__name__}.install() in each actor")]


def _asks_for_compilation(args: Any) -> bool:
    def of(holder: Any, name: str, default: Any) -> Any:
        return holder.get(name, default) if isinstance(holder, Mapping) else getattr(holder, name, default)

    setting = of(args, "compile", None)
    asked = setting if isinstance(setting, bool) else of(setting, "enable", setting)
    if asked is None or callable(asked):  # no such setting, or a module's method of that name
        return False
    if not isinstance(asked, bool):
        raise ConfigError(f"compile must be True or False, or have an enable that is, got {describe(asked)}")
    return asked
