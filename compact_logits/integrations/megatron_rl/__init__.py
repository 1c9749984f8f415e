"""Megatron-RL: log-probs of the sampled tokens without logits gathered over the vocabulary.

Off unless enabled, by `COMPACT_LOGITS=1` or by `--rl-use-vocab-parallel-selected-logprobs` (`add_arguments`). Then
`megatron.rl.rl_utils.get_logprobs` returns `(batch, sequence - 1)` as before, but no logits are gathered.

Old, reference and current log-probs are all fp32, also of a bf16 or fp16 model, where the gathered path takes the
log-softmax in the model's dtype and rounds each log-prob to it. The policy ratio `exp(current - old)` is then free of
that rounding, which alone moves it by up to 2^-8 of a log-prob's size, 3% for a log-prob of -8 in bf16, against a
clipping range of 1%; expect fewer clipped tokens than on the gathered path, not the same ones. All three change
together: a model takes the compact path in every pass or in none.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from compact_logits.config import Config
from compact_logits.diagnostics import Diagnostic
from compact_logits.errors import CompactLogitsError
from compact_logits.integrations.megatron_rl.marks import mark_tokens

if TYPE_CHECKING:
    from compact_logits.integrations.megatron_rl.installation import Installation

__all__ = ["SUPPORTED", "add_arguments", "check", "install", "mark_tokens", "uninstall"]

SUPPORTED = (
    "Megatron-LM main d98e8a64dd (0.20.0)",
    "megatron-core 0.19.2 with megatron.rl of Megatron-LM core_v0.19.0 (no context parallelism there)",
)

_FLAG = "--rl-use-vocab-parallel-selected-logprobs"

_installation: Installation | None = None


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this integration's one flag to Megatron's parser, off by default; for use in an `extra_args_provider`."""
    group = parser.add_argument_group(title="compact_logits")
    group.add_argument(
        _FLAG,
        action="store_true",
        help="Compute the log-probs of old, reference and current policy from the vocabulary-parallel output layer, "
        "in fp32, instead of from logits gathered over the vocabulary.",
    )
    return parser


def install(args: argparse.Namespace | None = None) -> None:
    """Switch the compact path on in this process, if `COMPACT_LOGITS` or the flag in `args` says so; else do nothing.

    `args`: Megatron's arguments. A run or a model that is refused keeps the gathered path, with the reason logged
    once. A second call does nothing.

    Raises `ConfigError` for an unknown setting and `PatchError` for a version of Megatron whose signatures are not the
    proven ones. With `COMPACT_LOGITS=strict`, the first pass of a refused setup raises `RefusedError`.
    """
    global _installation
    config = _config(args)
    if not config.enabled or _installation is not None:
        return
    from compact_logits.engine.kernels.verify import prove_on_all_ranks
    from compact_logits.integrations.megatron_rl.installation import Installation

    installation = Installation(config)
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
    name, proven = "megatron_rl", f"proven: {'; '.join(SUPPORTED)}"
    if _installation is not None:
        found = [Diagnostic(name, "refused", refusal.reason, refusal.remedy) for refusal in _installation.refused()]
        if not found or _installation.compacts():
            found.insert(0, Diagnostic(name, "on", f"installed, mode {_installation.config.mode}"))
        return found
    config = Config.from_env(os.environ)
    try:
        spec = importlib.util.find_spec("megatron.rl")
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        return [Diagnostic(name, "off", "megatron.rl is not on this Python's path", "put a Megatron-LM checkout there")]
    try:
        from compact_logits.integrations.megatron_rl.installation import Installation

        Installation(config)
    except (ImportError, CompactLogitsError) as error:
        return [Diagnostic(name, "refused", str(error), proven)]
    if not config.enabled:
        return [Diagnostic(name, "off", "COMPACT_LOGITS is unset or 0", f"export COMPACT_LOGITS=1, or pass {_FLAG}")]
    return [Diagnostic(name, "off", "not installed in this process", f"call {__name__}.install(args) before training")]


def _config(args: argparse.Namespace | None) -> Config:
    config = Config.from_env(os.environ)
    if not config.enabled and getattr(args, _FLAG.strip("-").replace("-", "_"), False):
        return replace(config, mode="on")
    return config
