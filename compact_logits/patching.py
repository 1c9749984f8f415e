"""Replace a function that others have defined, everywhere it is bound, and put it back exactly."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ClassMethodDescriptorType, FunctionType, ModuleType
from typing import Any

from compact_logits.errors import PatchError

__all__ = ["MARKER", "Patch", "PatchSet"]

MARKER = "__compact_logits_patch__"

_Descriptor = staticmethod | classmethod
_namespace_of: Callable[[ModuleType], dict[str, Any]] = vars(ModuleType)["__dict__"].__get__


class Patch:
    """One name of a module or a class, to be replaced by a wrapper of what is there.

    `wrap` gets the present function and returns the one to take its place; of a class it gets the plain function, also
    of a static or class method. The wrapper carries `__wrapped__` and the marker, and the original's name, docstring
    and signature. `requires` names the parameters without which the wrapper would not understand its caller.

    A function of a module is replaced in every loaded module that has it under any name, so that `from module import
    name` is no way around the patch. A method is replaced on `owner` alone; an inherited one is overridden there.
    What a closure, a container or a `functools.partial` holds is out of reach. Nothing happens before `apply`.
    """

    def __init__(
        self,
        owner: ModuleType | type,
        name: str,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
        *,
        requires: Sequence[str] = (),
    ) -> None:
        self.owner = owner
        self.name = name
        self.wrapper: Callable[..., Any] | None = None
        self._wrap = wrap
        self._requires = tuple(requires)
        self._original: Any = None
        self._taken: Any = None  # what stood in the class: the function, or its static or class method
        self._put: Any = None  # what stands there instead
        self._inherited = False
        self._places: list[tuple[dict[str, Any], str, str]] = []

    @property
    def label(self) -> str:
        """The dotted name of what is replaced."""
        if isinstance(self.owner, type):
            return f"{self.owner.__module__}.{self.owner.__qualname__}.{self.name}"
        return f"{self.owner.__name__}.{self.name}"

    @property
    def applied(self) -> bool:
        return self.wrapper is not None

    def apply(self) -> None:
        """Put the wrapper in place. Applying twice is applying once.

        Raises `PatchError`, with nothing changed, where the name is missing, is no function, lacks a required
        parameter or is patched by this package already; and where it was applied but has been replaced since.
        """
        if self.wrapper is not None:
            present = _function(self._present())
            if not any(link is self.wrapper for link in _chain(present)):
                raise PatchError(
                    f"{self.label} was patched by compact_logits and is now {_who(present)}, which does not say that "
                    f"it wraps the patch; undo that, or revert this patch, before applying it again"
                )
            return
        raw = self._present()
        original = self._patchable(raw)
        wrapper = self._wrap(original)
        assert isinstance(wrapper, FunctionType) and wrapper is not original, f"{wrapper!r} is not a new function"
        # A callable object's state is its own; only a function's attributes are part of how it is called.
        copied = functools.WRAPPER_UPDATES if isinstance(original, FunctionType) else ()
        functools.update_wrapper(wrapper, original, updated=copied)
        setattr(wrapper, MARKER, self)
        self._original, self.wrapper = original, wrapper
        if isinstance(self.owner, type):
            self._inherited = self.name not in vars(self.owner)
            self._taken, self._put = raw, _as_bound(raw, wrapper)
            setattr(self.owner, self.name, self._put)
        else:
            self._places = list(_bindings(original, self.owner))
            for namespace, key, _ in self._places:
                namespace[key] = wrapper

    def revert(self) -> None:
        """Put the original back wherever the wrapper is, also where it was imported from since. Twice is once.

        Raises `PatchError`, with nothing changed, where somebody has replaced the wrapper in the meantime: to put the
        original there would undo their patch as well.
        """
        if self.wrapper is None:
            return
        self.check_revertible()
        if isinstance(self.owner, type):
            if vars(self.owner).get(self.name) is self._put:
                if self._inherited:
                    delattr(self.owner, self.name)
                else:
                    setattr(self.owner, self.name, self._taken)
        else:
            # A module may have left sys.modules since, and still be in use by those who imported it.
            for namespace, key, _ in [*self._places, *_bindings(self.wrapper, self.owner)]:
                namespace[key] = self._original
        self.wrapper = self._original = self._taken = self._put = None
        self._places = []

    def check_revertible(self) -> None:
        """Raise the `PatchError` that `revert` would raise; change nothing."""
        if self.wrapper is None:
            return
        if isinstance(self.owner, type):
            found, known = [(self.label, self._present())], (self._put, self._taken)
        else:
            found = [(f"{module}.{key}", namespace.get(key)) for namespace, key, module in self._places]
            known = (self.wrapper, self._original)
        for place, present in found:
            if present is not known[0] and present is not known[1]:
                raise PatchError(
                    f"cannot revert {place}: it was patched by compact_logits and is now {_who(present)}; undo that "
                    f"patch first, then revert again"
                )

    def _present(self) -> Any:
        if isinstance(self.owner, type):
            present = inspect.getattr_static(self.owner, self.name, None)
        else:
            # Not getattr: a module's own __getattr__ may import, or make a new object each time.
            present = _namespace_of(self.owner).get(self.name)
        return present

    def _patchable(self, raw: Any) -> Callable[..., Any]:
        original = _function(raw)
        if not callable(original) or isinstance(original, type | property):
            found = "nothing there" if raw is None else f"a {type(raw).__name__}"
            raise PatchError(f"needed a function at {self.label} to patch, found {found}; is this version supported?")
        for link in _chain(original):
            other = getattr(link, MARKER, None)
            if isinstance(other, Patch) and other.wrapper is link:
                on_top = "" if link is original else f", below {_who(original)}"
                raise PatchError(f"{self.label} is patched by compact_logits already{on_top}; revert that patch first")
        if self._requires:
            try:
                parameters = list(inspect.signature(original).parameters)
            except (TypeError, ValueError) as error:
                raise PatchError(f"{self.label} has no signature to check ({error}); it cannot be patched") from error
            missing = [name for name in self._requires if name not in parameters]
            if missing:
                raise PatchError(
                    f"needed the parameters {', '.join(missing)} of {self.label}, which takes "
                    f"({', '.join(parameters)}); this version is not supported"
                )
        return original


class PatchSet:
    """Several patches that are in place all together or not at all."""

    def __init__(self, *patches: Patch) -> None:
        self.patches = patches

    @property
    def applied(self) -> bool:
        return bool(self.patches) and all(patch.applied for patch in self.patches)

    def apply(self) -> None:
        """Apply all, in order. Where one raises, those applied by this call are reverted, and its error goes on."""
        done: list[Patch] = []
        try:
            for patch in self.patches:
                fresh = not patch.applied
                patch.apply()
                if fresh:
                    done.append(patch)
        except BaseException:
            for patch in reversed(done):
                patch.revert()
            raise

    def revert(self) -> None:
        """Revert all, in reverse order. Raises `PatchError`, with nothing changed, where one of them cannot be."""
        for patch in self.patches:
            patch.check_revertible()
        for patch in reversed(self.patches):
            patch.revert()


def _bindings(value: object, owner: ModuleType) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Each name of `owner` and of each loaded module that is bound to `value`, as (namespace, key, module name)."""
    seen: set[int] = set()
    for module_name, module in [(owner.__name__, owner), *sys.modules.items()]:
        # By type, and the dict by its descriptor: a lazy module runs its import on any attribute access, and what
        # stands in for a module may answer anything.
        if not issubclass(type(module), ModuleType) or id(module) in seen:
            continue
        seen.add(id(module))
        namespace = _namespace_of(module)
        for key, bound in list((namespace or {}).items()):  # Python 3.10 has None for a module that was never set up
            if bound is value:
                yield namespace, key, module_name


def _function(raw: Any) -> Any:
    return raw.__func__ if isinstance(raw, _Descriptor) else raw


def _as_bound(raw: Any, wrapper: Any) -> Any:
    """The wrapper as `raw` is bound: a class method that is built in, as torch 2.15 has them, is one too."""
    if isinstance(raw, ClassMethodDescriptorType):
        return classmethod(wrapper)
    return type(raw)(wrapper) if isinstance(raw, _Descriptor) else wrapper


def _chain(function: Any) -> Iterator[Any]:
    """The function, and what it says it wraps, and so on."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        yield function
        function = getattr(function, "__wrapped__", None)


def _who(present: Any) -> str:
    """Where an object comes from. By its code, since a wrapper usually takes the name of what it wraps."""
    code = getattr(present, "__code__", None)
    if code is not None:
        return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
    return "gone" if present is None else f"an object of {type(present).__module__}.{type(present).__qualname__}"
