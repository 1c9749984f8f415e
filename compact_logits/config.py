"""One frozen configuration, read from the environment once, at install. Numeric functions never see it."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from compact_logits.errors import ConfigError
from compact_logits.host_values import describe

__all__ = ["Config", "parse_bytes"]

logger = logging.getLogger("compact_logits")

_PREFIX = "COMPACT_LOGITS"
_MODES: dict[str, Literal["off", "on", "strict"]] = {"": "off", "0": "off", "1": "on", "strict": "strict"}
# Fields of `Config` that are 0 or 1 in the environment, and what they are where it says nothing.
_SWITCHES: dict[str, bool | None] = {"check_ranks": None, "cp_balance": False, "fp32_logits": False}
_GONE = f"{_PREFIX}_COMPILE"
_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(text: str) -> int:
    """Return the number of bytes that `text` names: a whole number, or one with KiB, MiB or GiB behind it.

    Raises `ConfigError` for anything else, for zero and from 8 EiB on.
    """
    match = re.fullmatch(r"\s*(\d{1,19})\s*([a-zA-Z]*)\s*", text)
    count = int(match[1]) * _UNITS.get(match[2].lower(), 0) if match else 0
    if not 0 < count < 2**63:
        raise ConfigError(
            f"a byte count must be a positive whole number, or one with KiB, MiB or GiB, got {describe(text)}"
        )
    return count


@dataclass(frozen=True)
class Config:
    """What the environment asks for.

    `mode`: `"off"` installs nothing; `"on"` compacts what is proven and leaves the rest to the full path;
    `"strict"` raises `RefusedError` where `"on"` would leave it to the full path.
    `chunk_bytes`: bytes of logits the head may hold; None for 1 GiB on a GPU and 256 MiB on a CPU.
    `cp_balance`: whether context-parallel ranks even out the rows they project.
    `check_ranks`: whether tensor-parallel ranks compare their requests at every call (True), at none (False), or at the
    first call of a model (None).
    `fp32_logits`: whether 16-bit logits stay unrounded, on devices that offer such a product.
    """

    mode: Literal["off", "on", "strict"] = "off"
    chunk_bytes: int | None = None
    cp_balance: bool = False
    check_ranks: bool | None = None
    fp32_logits: bool = False

    @property
    def enabled(self) -> bool:
        return self.mode != "off"

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Config:
        """Read `COMPACT_LOGITS` and the names that begin with it from `environ`.

        Raises `ConfigError` for an unknown value, and for an unknown name that begins with `COMPACT_LOGITS`,
        since a mistyped switch that does nothing costs its user a run.
        """
        known = {_PREFIX, f"{_PREFIX}_CHUNK_BYTES", *[f"{_PREFIX}_{name.upper()}" for name in _SWITCHES]}
        unknown = sorted(name for name in environ if name.startswith(_PREFIX) and name not in {*known, _GONE})
        if unknown:
            raise ConfigError(
                f"unknown environment variable {unknown[0]}; the known ones are {', '.join(sorted(known))}"
            )
        value = environ.get(_PREFIX, "").strip().lower()
        if value not in _MODES:
            raise ConfigError(f"COMPACT_LOGITS must be unset, 0, 1 or strict, got {describe(environ[_PREFIX])}")
        chunk_bytes = environ.get(f"{_PREFIX}_CHUNK_BYTES")
        try:
            parsed = None if chunk_bytes is None else parse_bytes(chunk_bytes)
        except ConfigError as error:
            raise ConfigError(f"COMPACT_LOGITS_CHUNK_BYTES: {error}") from None
        switches: Any = {
            name: _switch(environ, f"{_PREFIX}_{name.upper()}", unset) for name, unset in _SWITCHES.items()
        }
        if _GONE in environ:
            _warn_of_compile()
        return cls(mode=_MODES[value], chunk_bytes=parsed, **switches)


def _switch(environ: Mapping[str, str], name: str, unset: bool | None) -> bool | None:
    if name not in environ:
        return unset
    value = environ[name].strip()
    if value not in ("0", "1"):
        raise ConfigError(f"{name} must be unset, 0 or 1, got {describe(environ[name])}")
    return value == "1"


@functools.cache
def _warn_of_compile() -> None:
    logger.warning(
        "%s is gone, since Triton kernels are the default on CUDA: it does nothing in this release and will be unknown "
        "in the next; unset it",
        _GONE,
    )
