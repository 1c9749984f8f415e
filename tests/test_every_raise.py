"""No `raise` of the package without its own words in a test, so that none is left out and no wording drifts unseen."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.source_tree import ROOT

PACKAGE = ROOT / "compact_logits"
# So many characters in a row tell one message from another; a message that has not so many in a row is told by its
# longest stretch, and one of less than a few is another's sentence with a place before it.
RUN, LEAST = 20, 8
MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "raise " in path.read_text())


class Raise(NamedTuple):
    module: str
    line: int
    runs: frozenset[str]  # of the stretches of its message that are the same each time


def texts_of(node: ast.AST) -> list[str]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def runs_of(texts: list[str]) -> frozenset[str]:
    longest = max(texts, key=len, default="")
    if len(longest) < RUN:
        return frozenset([longest] if len(longest) >= LEAST else [])
    return frozenset(text[at : at + RUN] for text in texts for at in range(len(text) - RUN + 1))


def raises_of(module: str, source: str) -> list[Raise]:
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise) and node.exc is not None]
    return sorted(Raise(module, node.lineno, runs_of(texts_of(node))) for node in found)


@cache
def all_raises() -> tuple[Raise, ...]:
    return tuple(each for module in MODULES for each in raises_of(module, (PACKAGE / module).read_text()))


def strings(source: str) -> list[str]:
    """A test's strings, also as a pattern means them; what nobody compares with anything is a docstring."""
    tree = ast.parse(source)
    idle = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in idle]
    plain = [n.value for n in found if isinstance(n.value, str)]
    return [*plain, *[re.sub(r"\\(.)", r"\1", text) for text in plain]]


@cache
def words_of_the_tests() -> str:
    here = Path(__file__)
    return "\n".join(t for path in (ROOT / "tests").rglob("*.py") if path != here for t in strings(path.read_text()))


def without_a_test(raises: list[Raise], every: tuple[Raise, ...], told: str) -> list[int]:
    """The lines of raises none of whose own words are told; one that only wraps another's sentence has none."""
    times = Counter(run for each in every for run in each.runs)
    missing = []
    for each in raises:
        own = {run for run in each.runs if times[run] == 1} or each.runs
        if own and not any(run in told for run in own):
            missing.append(each.line)
    return missing


@pytest.mark.parametrize("module", MODULES)
def test_every_raise_has_a_test_of_its_words(module: str) -> None:
    assert (
        without_a_test([each for each in all_raises() if each.module == module], all_raises(), words_of_the_tests())
        == []
    )


def test_what_would_be_missing() -> None:
    source = """
def f(n):
    if n:
        raise ValueError(f"needed a fresh egg, got {n}; wait for the hen")
    raise KeyError(n)
"""
    one = raises_of("a", source)
    other = raises_of("b", 'raise ValueError(f"needed an old hen, got {n}; wait for the hen")')
    every = (*one, *other)
    assert [each.line for each in one] == [4, 5]
    for told, missing in (
        ('match = r"needed a fresh egg, got \\(7\\)"', []),
        ('said = "ed a fresh egg, got 7; w"', []),
        ('"""needed a fresh egg, got 7"""', [4]),
        ('said = "7; wait for the hen"', [4]),  # both say that
        ('said = "needed a fresh"', [4]),
    ):
        assert without_a_test(one, every, "\n".join(strings(told))) == missing, told
    (short,) = raises_of("c", 'raise ValueError(f"{n} must be: {n}")')
    assert without_a_test([short], (short,), "it must be: 7") == []
    assert without_a_test([short], (short,), "it must be 7") == [1]
    assert not raises_of("d", 'raise ValueError(f"{n}: {error}")')[0].runs
    assert len(all_raises()) > 200
