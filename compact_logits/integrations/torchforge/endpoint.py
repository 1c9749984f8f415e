"""Patch what an endpoint of an actor runs: Monarch keeps the method inside an object that it puts in the class."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from compact_logits.errors import PatchError
from compact_logits.patching import MARKER, Patch

__all__ = ["EndpointPatch"]


class EndpointPatch(Patch):
    """As `Patch`, of a coroutine method that `@endpoint` stands before: the actor still finds the endpoint it defined,
    and the endpoint runs the wrapper. `wrap` gets and returns the coroutine function."""

    def apply(self) -> None:
        """Put the wrapper into the endpoint. Applying twice is applying once; errors as `Patch.apply`."""
        if self.wrapper is not None:
            self.check_revertible()
            return
        original = self._patchable(self._method())
        wrapper = self._wrap(original)
        assert isinstance(wrapper, FunctionType) and inspect.iscoroutinefunction(wrapper)
        functools.update_wrapper(wrapper, original)
        setattr(wrapper, MARKER, self)
        self._original, self.wrapper = original, wrapper
        self._endpoint()._method = wrapper

    def revert(self) -> None:
        """Put the method back. Twice is once. Raises `PatchError`, with nothing changed, where it is not ours now."""
        if self.wrapper is None:
            return
        self.check_revertible()
        self._endpoint()._method = self._original
        self.wrapper = self._original = None

    def check_revertible(self) -> None:
        """Raise the `PatchError` that `revert` would raise; change nothing."""
        if self.wrapper is not None and getattr(self._endpoint(), "_method", None) is not self.wrapper:
            raise PatchError(
                f"{self.label} was patched by compact_logits and has been replaced since; undo that patch first"
            )

    def _endpoint(self) -> Any:
        return inspect.getattr_static(self.owner, self.name, None)

    def _method(self) -> Callable[..., Any]:
        method = getattr(self._endpoint(), "_method", None)
        if not inspect.iscoroutinefunction(method):
            found = type(self._endpoint()).__name__
            raise PatchError(f"needed an endpoint with a coroutine at {self.label} to patch, found a {found}")
        return method
