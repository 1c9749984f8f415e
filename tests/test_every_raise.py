"""No `raise` of the package without a test of its type and of what its message names; the prose is free to change."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from compact_logits import errors
from tests.support.source_tree import ROOT

PACKAGE = ROOT / "compact_logits"
MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "raise " in path.read_text())


class Raise(NamedTuple):
    module: str
    line: int
    kinds: frozenset[str]  # the names by which a test may expect its type
    words: frozenset[str]  # of its message


class Strings(NamedTuple):
    """What a test file compares with: its strings, and the error types that it, or its support, names."""

    texts: tuple[frozenset[str], ...]  # the words of each string
    kinds: frozenset[str]
    support: frozenset[str]  # modules of tests.support that it imports


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
        made.append(Raise(module, node.lineno, kinds_of(node.exc), words))
    return sorted(made)


@cache
def all_raises() -> tuple[Raise, ...]:
    return tuple(each for module in MODULES for each in raises_of(module, (PACKAGE / module).read_text()))


def strings(source: str) -> Strings:
    """What nobody compares with anything, a docstring, does not count."""
    tree = ast.parse(source)
    idle = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in idle]
    found += [" ".join(texts_of(n)) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr)]
    # As a pattern means them: a dot that is escaped is a dot.
    texts = [re.sub(r"\\(.)", r"\1", text) for text in found if isinstance(text, str)]
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)
    }
    support = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    return Strings(tuple(map(words_of, texts)), frozenset(names), frozenset(support))


@cache
def all_strings() -> tuple[Strings, ...]:
    here, found = Path(__file__), {}
    for path in (ROOT / "tests").rglob("*.py"):
        if path != here:
            found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = strings(path.read_text())
    return tuple(
        each._replace(kinds=each.kinds.union(*(found[name].kinds for name in each.support & found.keys())))
        for each in found.values()
    )


def with_a_test(every: tuple[Raise, ...], files: tuple[Strings, ...]) -> set[Raise]:
    """The raises whose message some string of a test resembles most, with two words of it or the one that it has, in a
    file that names the type. Of a command, users see the message alone, and so do its tests."""
    found = set()
    for file in files:
        expected = [each for each in every if each.kinds & file.kinds or each.module.startswith("cli/")]
        for text in file.texts:
            most = max((len(each.words & text) for each in expected), default=0)
            near = [each for each in expected if len(each.words & text) == most]
            found |= {each for each in near if most >= min(2, len(each.words))}
    return found


@cache
def all_tested() -> set[Raise]:
    return with_a_test(all_raises(), all_strings())


@pytest.mark.parametrize("module", MODULES)
def test_every_raise_has_a_test_of_its_type_and_of_what_it_names(module: str) -> None:
    # One whose message is another's sentence, wrapped, has no words of its own.
    mine = [each for each in all_raises() if each.module == module and each.words]
    assert [each.line for each in mine if each not in all_tested()] == []


def test_what_would_be_missing() -> None:
    source = """
def f(n):
    if n:
        raise InputError(f"needed a fresh egg of chunk_bytes, got {n}; wait for the hens")
    raise KeyError(n)
"""
    (one, _), (other,) = (
        raises_of("a", source),
        raises_of("b", 'raise InputError(f"needed some elderly hens, got {n}; wait for the hens")'),
    )
    for text, is_tested in (
        ('expects(InputError, r"needed a fresh egg of chunk_bytes, got \\(7\\)")', True),
        ('expects(ValueError, "of chunk_bytes a fresh one is needed")', True),  # other prose, the same names
        ('expects(LayoutError, "needed a fresh egg of chunk_bytes")', False),
        ('InputError\n"""needed a fresh egg of chunk_bytes, got 7"""', False),
        ('expects(InputError, "needed some elderly hens, wait for the hens")', False),  # the other's
        ('expects(InputError, "fresh")', False),
    ):
        assert (one in with_a_test((one, other), (strings(text),))) is is_tested, text
    assert len(all_raises()) > 200
