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
from compact_logits.diagnostics import Diagnostic
from compact_logits.errors import PatchError
from compact_logits.integrations.torchforge.hidden import compute_logprobs_from_hidden
from compact_logits.integrations.torchforge.logits import compute_logprobs
from compact_logits.integrations.torchforge.targets import warn_of_compile

if TYPE_CHECKING:
    from compact_logits.integrations.torchforge.installation import Installation

__all__ = ["SUPPORTED", "check", "compute_logprobs", "compute_logprobs_from_hidden", "install", "uninstall"]

SUPPORTED = ("torchforge 6e77f0b3 (0.1.0, with torchmonarch 0.1.2 and torchtitan 0.2.0)",)

_installation: Installation | None = None


def install(args: Any = None) -> None:
    """Switch the compact path on in this process, if `COMPACT_LOGITS` says so; with it unset nothing changes.

    `args`: an actor or its configuration. Its `compile` does nothing any more, which is logged once where it is on.
    Installing twice is installing once. A call whose logits are not laid out as `compute_logprobs` needs them goes to
    torchforge's own function, with the reason logged once. Ranks that share a vocabulary compare what they were given
    at their first call (`COMPACT_LOGITS_CHECK_RANKS`: at every call or at none): all of them go to torchforge's own
    function if one refuses, and raise `DisagreementError` if they differ. At a call where they do not compare, a rank
    that refuses raises `InputError`, since the others may be in a collective already.

    Raises `ConfigError` for an unknown setting, `PatchError` for a version of torchforge whose signatures are not the
    proven ones, `ImportError` where torchforge or what it needs is missing, and, with `COMPACT_LOGITS=strict`,
    `RefusedError` at a call that would go to torchforge's own function.
    """
    global _installation
    config = Config.from_env(os.environ)
    if not config.enabled or _installation is not None:
        return
    from compact_logits.integrations.torchforge.installation import Installation

    if _has_compile(args):
        warn_of_compile()
    installation = Installation(config)
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

        Installation(config)
    except (ImportError, PatchError) as error:
        return [Diagnostic(name, "refused", str(error), f"proven: {'; '.join(SUPPORTED)}")]
    return [Diagnostic(name, "off", "not installed in this process", f"call {__name__}.install() in each actor")]


def _has_compile(args: Any) -> bool:
    """Whether `compile` is on: a bool, or, as torchtitan has it, something with a bool `enable`."""

    def of(holder: Any, name: str) -> Any:
        return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)

    setting = of(args, "compile")
    return setting is True or of(setting, "enable") is True
