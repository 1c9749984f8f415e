"""No `raise` of the package without a test of its type and of what its message names; the prose is free to change."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest

from compact_logits import errors
from tests.support.source_tree import ROOT

PACKAGE = ROOT / "compact_logits"
MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "raise " in path.read_text())

Pair = tuple[str, str]


class Raise(NamedTuple):
    module: str
    line: int
    kinds: frozenset[str]  # the names by which a test may expect its type
    pairs: frozenset[Pair]  # of its message's words


class Strings(NamedTuple):
    """What a test file compares with: its strings, and the error types that it names."""

    texts: tuple[frozenset[str], ...]  # the words of each string
    kinds: frozenset[str]


def words_of(text: str) -> frozenset[str]:
    """Names and words of four letters and more, which is what a message is recognised by."""
    return frozenset(re.findall(r"[A-Za-z0-9_]{4,}", text))


def texts_of(node: ast.AST) -> list[str]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def kinds_of(node: ast.expr) -> frozenset[str]:
    name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
    kind = getattr(errors, name, None)
    return frozenset(each.__name__ for each in kind.__mro__) if kind is not None else frozenset([name])


def raises_of(module: str, source: str) -> list[Raise]:
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)]
    made = []
    for node in found:
        if node.exc is None:
            continue
        words = frozenset().union(*map(words_of, texts_of(node.exc)))
        made.append(Raise(module, node.lineno, kinds_of(node.exc), frozenset(combinations(sorted(words), 2))))
    return sorted(made)


@cache
def all_raises() -> tuple[Raise, ...]:
    return tuple(each for module in MODULES for each in raises_of(module, (PACKAGE / module).read_text()))


def strings(source: str) -> Strings:
    """What nobody compares with anything, a docstring, does not count."""
    tree = ast.parse(source)
    idle = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in idle]
    # As a pattern means them: a dot that is escaped is a dot.
    texts = [re.sub(r"\\(.)", r"\1", n.value) for n in found if isinstance(n.value, str)]
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)
    }
    return Strings(tuple(map(words_of, texts)), frozenset(names))


@cache
def all_strings() -> tuple[Strings, ...]:
    here = Path(__file__)
    return tuple(strings(path.read_text()) for path in (ROOT / "tests").rglob("*.py") if path != here)


def without_a_test(raises: list[Raise], every: tuple[Raise, ...], files: tuple[Strings, ...]) -> list[int]:
    """The lines of raises for which no test file names the type and has a string with two words that only this message
    has together. A message that has no such two, since it wraps another's sentence, is not looked for."""
    times = Counter(pair for each in every for pair in each.pairs)
    missing = []
    for each in raises:
        own = {pair for pair in each.pairs if times[pair] == 1}
        # Of a command, users see the message alone, and so do its tests.
        read = [file for file in files if each.kinds & file.kinds or each.module.startswith("cli/")]
        if own and not any(a in text and b in text for file in read for text in file.texts for a, b in own):
            missing.append(each.line)
    return missing


@pytest.mark.parametrize("module", MODULES)
def test_every_raise_has_a_test_of_its_type_and_of_what_it_names(module: str) -> None:
    mine = [each for each in all_raises() if each.module == module]
    assert without_a_test(mine, all_raises(), all_strings()) == []


def test_what_would_be_missing() -> None:
    source = """
def f(n):
    if n:
        raise InputError(f"needed a fresh egg of chunk_bytes, got {n}; wait for the hen")
    raise KeyError(n)
"""
    one = raises_of("a", source)
    other = raises_of("b", 'raise InputError(f"needed some old hen, got {n}; wait for the hen")')
    every = (*one, *other)
    for text, missing in (
        ('expects(InputError, r"needed a fresh egg, got \\(7\\)")', []),
        ('expects(ValueError, "chunk_bytes: a fresh egg is what it takes")', []),  # other prose, the same names
        ('expects(LayoutError, "needed a fresh egg")', [4]),
        ('InputError\n"""needed a fresh egg, got 7"""', [4]),
        ('expects(InputError, "needed: wait for the hen")', [4]),  # both say that
    ):
        assert without_a_test(one, every, (strings(text),)) == missing, text
    assert len(all_raises()) > 200
