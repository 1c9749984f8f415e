"""A pytest plugin for torchforge's own test run: with it, what those tests import is what `install` put there.

`TORCHFORGE_ROOT` names the checkout. At the end it prints how often ours was called.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from compact_logits.integrations import torchforge
from compact_logits.integrations.torchforge import installation
from tests.support.torchforge_tree import forge_modules

_modules = forge_modules(os.environ["TORCHFORGE_ROOT"])
_calls = 0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeout: of a plugin that torchforge's tests have")
    _modules.__enter__()
    ours = installation.compute_logprobs

    def counted(*args: Any, **kwargs: Any) -> Any:
        global _calls
        result = ours(*args, **kwargs)
        _calls += 1
        return result

    installation.compute_logprobs = counted
    torchforge.install()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"compute_logprobs of compact_logits answered {_calls} calls")


def pytest_unconfigure() -> None:
    torchforge.uninstall()
    _modules.__exit__(None, None, None)
