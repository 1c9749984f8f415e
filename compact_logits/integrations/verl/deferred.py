"""Install once verl's Megatron engine is there: verl loads its plugins while it is itself only half imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from compact_logits.config import Config
from compact_logits.errors import CompactLogitsError, PatchError

__all__ = ["install_after"]

logger = logging.getLogger("compact_logits")

_ENGINE = "verl.workers.engine.megatron.transformer_impl"


def install_after(install: Callable[[], None]) -> Callable[[], None]:
    """Call `install` when verl's Megatron engine has been imported, now if it has been. Returns how to call that off.

    With `COMPACT_LOGITS` unset nothing is prepared. A process that never trains with Megatron pays nothing.
    """
    try:
        config = Config.from_env(os.environ)
    except CompactLogitsError as error:
        # verl reports what a plugin raises at debug level alone.
        logger.error("compact_logits is not installed in verl: %s", error)
        raise
    finder = _Finder(lambda: _install(install, strict=config.mode == "strict"))
    if not config.enabled:
        return finder.remove
    if _ENGINE in sys.modules:
        _install(install, strict=config.mode == "strict")
    else:
        sys.meta_path.insert(0, finder)
    return finder.remove


def _install(install: Callable[[], None], *, strict: bool) -> None:
    try:
        install()
    except PatchError as error:
        if strict:
            raise
        logger.warning("full path for top-k distillation: %s", error)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find the engine's module, and has `then` called when it has run."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _ENGINE:
            return None
        self.remove()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader(importlib.abc.Loader):
    """The real loader, and a call when it is done."""

    def __init__(self, real: importlib.abc.Loader, then: Callable[[], None]) -> None:
        self._real = real
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._real
        module.__loader__ = self._real
        self._real.exec_module(module)
        self._then()
