"""Modules made for a test to be patched, and a wrapper whose effect can be heard."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest

SOURCE = 'def speak(word, times=1):\n    "Say it."\n    return word * times\n'
USER = "from patched_source import speak\nfrom patched_source import speak as s\n"


def louder(original: Callable[..., str]) -> Callable[..., str]:
    def wrapper(*args, **kwargs):
        return original(*args, **kwargs) + "!"

    return wrapper


def make_module(monkeypatch: pytest.MonkeyPatch, name: str, code: str = "") -> ModuleType:
    """A module that runs `code` and stands in `sys.modules` for the time of the test."""
    module = ModuleType(name)
    exec(compile(code, f"{name}.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, name, module)
    return module
