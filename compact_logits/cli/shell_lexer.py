"""A bash script cut into commands and words, as far as a launch script needs it. Nothing is run or expanded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from compact_logits.errors import InputError

__all__ = ["Command", "Piece", "RawWord", "lex"]

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_ASSIGNS_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_REDIRECTION = re.compile(r"(?:\d+|&)?(?:>>?|<)(?:&\d*-?|\|)?|<>")
_HERE_DOCUMENT = re.compile(r"<<(-?)\s*(\\?)(['\"]?)([\w.]+)\3")
_PLAIN = re.compile(r"""[^\s;&|()<>\\'"$`]+""")
_PLAIN_QUOTED = re.compile(r"""[^"\\$`]+""")
_OPERATOR = re.compile(r"&&|\|\||;;|\|&|[;&|()]")


@dataclass(frozen=True)
class Piece:
    """Part of a word: text as it stands, a `$variable` by what is inside its braces, or a `$(command)`."""

    kind: Literal["text", "variable", "command"]
    text: str
    quoted: bool


@dataclass(frozen=True)
class RawWord:
    """One word before expansion; `array` holds the words of `NAME=(...)`, whose `NAME=` are the pieces."""

    pieces: tuple[Piece, ...]
    array: tuple[RawWord, ...] | None = None

    @property
    def text(self) -> str:
        """Its text if it is nothing but text, else an empty string, which no keyword and no name of a command is."""
        return "".join(piece.text for piece in self.pieces) if all(p.kind == "text" for p in self.pieces) else ""


@dataclass(frozen=True)
class Command:
    """A simple command and the operator before it: `""`, `"&&"`, `"||"`, `"|"`, `"("` and so on."""

    words: tuple[RawWord, ...]
    operator: str


def lex(text: str) -> Iterator[Command]:
    """Cut `text` into commands. Redirections, here-documents and comments are left out.

    Raises `InputError` for a quote, a bracket or a brace that is never closed.
    """
    return _Lexer(text).commands()


@dataclass
class _Lexer:
    text: str
    at: int = 0
    here_documents: list[tuple[str, bool]] = field(default_factory=list)

    def commands(self) -> Iterator[Command]:
        words: list[RawWord] = []
        operator = ""
        while (found := self._separator()) is not None:
            if found:
                if words:
                    yield Command(tuple(words), operator)
                    words = []
                operator = "" if found == "\n" else found
            elif not words and self.text.startswith("((", self.at):
                self._skip_arithmetic()
            elif word := self._word():
                words.append(word)
                if word.text in ("for", "while", "until", "if") and self.text.startswith("((", self._blanks()):
                    self._skip_arithmetic()
        if words:
            yield Command(tuple(words), operator)

    def _blanks(self) -> int:
        while self.at < len(self.text):
            if self.text[self.at] in " \t\r":
                self.at += 1
            elif self.text.startswith("\\\n", self.at) or self.text.startswith("\\\r\n", self.at):
                self.at = self.text.index("\n", self.at) + 1
            else:
                break
        return self.at

    def _separator(self) -> str | None:
        """Pass over blanks and comments; what ends a command here, "" before a word, None at the end."""
        self._blanks()
        if self.text.startswith("#", self.at):
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end
        if self.at >= len(self.text):
            return None
        if self.text[self.at] == "\n":
            self.at += 1
            self._skip_here_documents()
            return "\n"
        if _REDIRECTION.match(self.text, self.at) or self.text.startswith("((", self.at):
            return ""
        if match := _OPERATOR.match(self.text, self.at):
            self.at = match.end()
            return match[0]
        return ""

    def _word(self) -> RawWord | None:
        """The next word, or None for a redirection, which is passed over with its target."""
        if here := _HERE_DOCUMENT.match(self.text, self.at):
            self.at = here.end()
            self.here_documents.append((here[4], bool(here[1])))
            return None
        if self.text.startswith("<<<", self.at):
            self.at += 3
            self._blanks()
            self._word()
            return None
        if redirection := _REDIRECTION.match(self.text, self.at):
            self.at = redirection.end()
            # `2>&1` and `<&-` are whole; after any other stands its target.
            if redirection[0][-1] not in "0123456789-" and self._blanks() < len(self.text):
                self._pieces()
            return None
        pieces = self._pieces()
        if not pieces:  # a character that begins no word: a bracket without its fellow
            self.at += 1
            return None
        word = RawWord(tuple(pieces))
        if self.text.startswith("(", self.at) and _ASSIGNS_ARRAY.fullmatch(word.text):
            self.at += 1
            return RawWord(word.pieces, tuple(self._array()))
        return word

    def _array(self) -> Iterator[RawWord]:
        start = self.at
        while (found := self._separator()) is not None:
            if found == ")":
                return
            if not found and (word := self._word()):
                yield word
        raise self._unclosed("an array's (", start)

    def _pieces(self) -> list[Piece]:
        pieces: list[Piece] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\r\n;&|()<>":
                break
            if char == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                self.at += 2
                if following != "\n":
                    pieces.append(Piece("text", following, True))
            elif char == "'":
                pieces.append(Piece("text", self._until("'", self.at + 1), True))
            elif char == '"':
                pieces += self._double_quoted()
            elif char in "$`":
                pieces.append(self._expansion(quoted=False))
            else:
                pieces.append(Piece("text", self._run(_PLAIN), False))
        return pieces

    def _double_quoted(self) -> Iterator[Piece]:
        start = self.at
        self.at += 1
        yield Piece("text", "", True)
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self.at += 1
                return
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in ("\\", '"', "$", "`", "\n"):
                escaped = self.text[self.at + 1]
                self.at += 2
                yield Piece("text", "" if escaped == "\n" else escaped, True)
            elif char in "$`":
                yield self._expansion(quoted=True)
            else:
                yield Piece("text", self._run(_PLAIN_QUOTED), True)
        raise self._unclosed('a "', start)

    def _run(self, plain: re.Pattern[str]) -> str:
        """The text up to the next character that may mean something; that character too where it means nothing."""
        match = plain.match(self.text, self.at)
        end = match.end() if match else self.at + 1
        found, self.at = self.text[self.at : end], end
        return found

    def _expansion(self, *, quoted: bool) -> Piece:
        if self.text[self.at] == "`":
            return Piece("command", self._until("`", self.at + 1), quoted)
        following = self.text[self.at + 1 : self.at + 2]
        if following == "{":
            return Piece("variable", self._balanced("{", "}"), quoted)
        if following == "(":
            return Piece("command", self._balanced("(", ")"), quoted)
        if following == "'" and not quoted:
            self.at += 1
            return Piece("text", self._until("'", self.at + 1), True)
        name = _NAME.match(self.text, self.at + 1)
        self.at = name.end() if name else self.at + 1
        return Piece("variable", name[0], quoted) if name else Piece("text", "$", quoted)

    def _balanced(self, opening: str, closing: str) -> str:
        """What stands between the bracket after `$` and its fellow; quotes hide brackets."""
        start, depth = self.at, 0
        at = self.at + 1
        while at < len(self.text):
            char = self.text[at]
            depth += (char == opening) - (char == closing)
            if char == "\\":
                at += 1
            elif char == "'" and opening == "(":
                self.at = at
                self._until("'", at + 1)
                at = self.at - 1
            elif depth == 0:
                self.at = at + 1
                return self.text[start + 2 : at]
            at += 1
        raise self._unclosed("$" + opening, start)

    def _until(self, closing: str, start: int) -> str:
        end = self.text.find(closing, start)
        if end < 0:
            raise self._unclosed(closing, start - 1)
        self.at = end + 1
        return self.text[start:end]

    def _skip_arithmetic(self) -> None:
        end = self.text.find("))", self.at)
        if end < 0:
            raise self._unclosed("((", self.at)
        self.at = end + 2

    def _skip_here_documents(self) -> None:
        for name, tabs in self.here_documents:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                line = self.text[self.at : len(self.text) if end < 0 else end]
                self.at += len(line) + 1
                if (line.lstrip("\t") if tabs else line) == name:
                    break
        self.here_documents = []

    def _unclosed(self, what: str, start: int) -> InputError:
        line = self.text.count("\n", 0, start) + 1
        return InputError(f"line {line}: {what} is never closed, so the flags after it can't be told")
