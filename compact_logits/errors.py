"""The errors users meet. All are `ValueError`s: the input or the setting was wrong, and the message says what to do."""

from __future__ import annotations

__all__ = [
    "CompactLogitsError",
    "ConfigError",
    "DisagreementError",
    "InputError",
    "LayoutError",
    "PatchError",
    "RefusedError",
]


class CompactLogitsError(ValueError):
    """Base of every error this package raises on purpose."""


class ConfigError(CompactLogitsError):
    """A setting has a value that is not among the valid ones."""


class InputError(CompactLogitsError):
    """A tensor's shape, dtype, range or origin is not what the function computes on."""


class DisagreementError(InputError):
    """The ranks of a group were asked different things. All of them raise it."""


class LayoutError(CompactLogitsError):
    """Lengths, masks and token rows of a micro-batch do not fit together."""


class PatchError(CompactLogitsError):
    """A name cannot be replaced, or cannot be restored, without guessing."""


class RefusedError(CompactLogitsError):
    """`COMPACT_LOGITS=strict` met a setup for which only the full path is proven."""
