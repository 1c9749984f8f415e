"""The words that a launch script gives to the training command, found by reading it. Nothing is executed.

Assignments, arrays and sourced files are followed; what only running the script would tell (the environment, the output
of commands, which branch is taken) is carried along by name, never guessed.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from compact_logits.cli.shell_lexer import Piece, RawWord, lex
from compact_logits.errors import InputError

__all__ = ["MAX_SCRIPT_BYTES", "Launch", "Word", "read_arguments", "read_launch_script"]

MAX_SCRIPT_BYTES = 2**20
_MAX_WORDS = 20_000
_MAX_WORD_LENGTH = 2**16
_MAX_SOURCED = 16

_ENTRY = re.compile(r"(?:.*/)?train(?:_async)?\.py")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"([A-Za-z_]\w*)(\[[@*]\])?")
# A script's own folder, as scripts find it: `cd -- "$(dirname -- "${BASH_SOURCE[0]}")/up" &>/dev/null && pwd`.
_OWN_FOLDER = re.compile(
    r"""\s*(?:cd\s+(?:--\s+)?["']?\$\(\s*)?dirname\s+(?:--\s+)?"?\$(?:\{(?:BASH_SOURCE(?:\[0\])?|0)\}|BASH_SOURCE|0)"?\s*"""
    r"""(?:\)(?P<up>(?:/\.\.)*)["']?\s*(?:&?>\s*/dev/null\s*)?(?:2>&1\s*)?&&\s*pwd(?:\s+-P)?\s*)?"""
)
_OPENING = {"if", "for", "while", "until", "case", "select"}
_CLOSING = {"fi", "done", "esac"}
_TRANSPARENT = {"then", "do", "else", "elif", "!", "time", "command", "exec"}
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}


@dataclass(frozen=True)
class Word:
    """A word after expansion. `unknown` names what in it only running the script would tell; it stands in the text as
    it was written. `spreads`: such a part may become any number of words. `certain` is false where the word comes from
    a branch that may not be taken."""

    text: str
    unknown: tuple[str, ...] = ()
    spreads: bool = False
    certain: bool = True


@dataclass
class Launch:
    """What follows the training script on its command line, and what could not be read of it."""

    words: list[Word]
    notes: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)  # COMPACT_LOGITS... as the script sets them


def read_arguments(text: str) -> Launch:
    """The words of an argument string, quoted as for a shell."""
    reader = _Reader(None)
    reader.read(text.replace("\\\n", " ").replace("\n", " "))
    if not reader.launches:
        reader.launches = [reader.last]
    return reader.launch()


def read_launch_script(path: Path) -> Launch:
    """The words after `train.py` or `train_async.py` in the script at `path`, files that it sources included.

    Raises `InputError`, in one line, for a file that can't be read as a script or in which neither is called.
    """
    try:
        text = _script_text(path)
        reader = _Reader(path.resolve().parent)
        reader.read(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if not reader.launches:
        raise InputError(f"{path}: needed a call of train.py or train_async.py, found none; pass its arguments instead")
    return reader.launch()


def _script_text(path: Path) -> str:
    try:
        # Not opened before that is known: a pipe would be waited for, a device may have no end.
        is_file = stat.S_ISREG(path.stat().st_mode)
        content = b""
        if is_file:
            with path.open("rb") as file:
                content = file.read(MAX_SCRIPT_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"needed a readable launch script: {reason}") from None
    if not is_file:
        raise InputError("needed a file, got a folder or a device")
    if len(content) > MAX_SCRIPT_BYTES or b"\0" in content:
        raise InputError(f"needed a launch script of at most {MAX_SCRIPT_BYTES} bytes of text, got something else")
    if path.suffix == ".py" or re.match(rb"#!.*python", content):
        raise InputError("needed a bash script, got Python; pass the arguments that it builds instead")
    return content.decode("utf-8", errors="replace")


class _Reader:
    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.launches: list[list[Word]] = []
        self.last: list[Word] = []
        self.notes: list[str] = []
        self.settings: dict[str, str] = {}
        self._scope: dict[str, list[Word]] = {}
        self._depth = 0
        self._sourced = 0

    def launch(self) -> Launch:
        if len(self.launches) > 1:
            self.notes.append(f"the training script is called in {len(self.launches)} places; the first one was read")
        return Launch(self.launches[0], self.notes, self.settings)

    def read(self, text: str) -> None:
        for command in lex(text):
            words = list(command.words)
            self._follow_branches(words)
            if words:
                self._run(words, certain=self._depth == 0 and command.operator not in ("&&", "||"))

    def _follow_branches(self, words: list[RawWord]) -> None:
        """Pass over keywords at the head of a command, and count how many branches and bodies it stands in."""
        while words:
            head = words[0].text
            if head in _OPENING or head == "{":
                self._depth += 1
            elif head in _CLOSING or head == "}":
                self._depth = max(self._depth - 1, 0)
            elif head not in _TRANSPARENT:
                return
            if head in ("for", "case", "select"):
                words.clear()
            else:
                del words[0]

    def _run(self, words: list[RawWord], *, certain: bool) -> None:
        declares = words[0].text in _DECLARING
        if declares:
            del words[0]
        while words and (assigned := self._assignment(words[0])):
            self._assign(*assigned, certain=certain)
            del words[0]
        if not words or declares:
            return
        if words[0].text == "unset":
            for word in words[1:]:
                self._scope.pop(word.text, None)
            return
        expanded = self._expand(words)
        self._note_settings(expanded)
        if words[0].text in ("source", ".") and len(expanded) > 1:
            self._source(expanded[1])
            return
        if self.launches and expanded[0].text.startswith("--"):
            self.notes.append(
                f"a command of its own begins with {expanded[0].text} after the training script's: is a \\ missing?"
            )
        self.last = expanded
        entry = next((place for place, word in enumerate(expanded) if _ENTRY.fullmatch(word.text)), None)
        if entry is not None and words[0].text not in ("echo", "printf", "pkill", "cat", "cp"):
            self.launches.append(expanded[entry + 1 :])

    def _assignment(self, word: RawWord) -> tuple[str, bool, list[Word]] | None:
        """Name, whether it is added to, and value, of a word that assigns."""
        if not word.pieces or word.pieces[0].kind != "text" or word.pieces[0].quoted:
            return None
        match = _ASSIGNMENT.fullmatch(word.pieces[0].text)
        if match is None:
            return None
        if word.array is not None:
            return match[1], bool(match[2]), self._expand(word.array)
        rest = RawWord((replace(word.pieces[0], text=match[3]), *word.pieces[1:]))
        return match[1], bool(match[2]), [self._joined(rest)]

    def _assign(self, name: str, adds: bool, value: list[Word], *, certain: bool) -> None:
        before = self._scope.get(name, [])
        if name.startswith("COMPACT_LOGITS"):
            self.settings[name] = " ".join(word.text for word in value)
        if not certain:
            value = [replace(word, certain=False) for word in value]
            before = before if adds else [replace(word, certain=False) for word in before]
        self._scope[name] = [*before, *value] if adds or not certain else value

    def _source(self, path: Word) -> None:
        self._sourced += 1
        if path.unknown or self._sourced > _MAX_SOURCED or self.folder is None:
            self.notes.append(f"sourced file {path.text} was not read")
            return
        outer, inner = self.folder, Path(path.text)
        try:
            text = _script_text(inner)
        except InputError as error:
            self.notes.append(f"sourced file {inner} was not read: {error}")
            return
        self.folder = inner.resolve().parent
        self.read(text)
        self.folder = outer

    def _note_settings(self, words: Iterable[Word]) -> None:
        for word in words:
            for name, value in re.findall(r"\b(COMPACT_LOGITS\w*)[\"'\s]*[:=][\"'\s]*([\w.]+)", word.text):
                self.settings[name] = value

    def _expand(self, words: Iterable[RawWord]) -> list[Word]:
        found: list[Word] = []
        for word in words:
            found += self._words(word)
            if len(found) > _MAX_WORDS:
                raise InputError(f"its arrays expand to more than {_MAX_WORDS} words")
        return found

    def _words(self, word: RawWord) -> list[Word]:
        """The words that one becomes: an array's, those that blanks in an unquoted variable separate, or one."""
        if word.array is not None:
            return [self._joined(word)]
        (only,) = word.pieces if len(word.pieces) == 1 else (None,)
        significant = [piece for piece in word.pieces if piece.text or piece.kind != "text"]
        if len(significant) == 1 and significant[0].kind == "variable":
            only = significant[0]
        if only is None or only.kind == "text":
            return [self._joined(word)]
        value, is_array = self._value(only)
        if only.quoted and not is_array:
            return [self._joined(word)]
        if only.quoted:
            return value
        split = []
        for each in value:
            split += [replace(each, text=text) for text in each.text.split()] if not each.unknown else [each]
        return split

    def _joined(self, word: RawWord) -> Word:
        """The word as one, as in quotes or in an assignment."""
        text, unknown, certain, spreads = "", [], True, False
        for piece in word.pieces:
            value = [Word(piece.text)] if piece.kind == "text" else self._value(piece)[0]
            text += " ".join(each.text for each in value)
            unknown += [name for each in value for name in each.unknown]
            certain = certain and all(each.certain for each in value)
            spreads = spreads or any(each.spreads for each in value)
            if len(text) > _MAX_WORD_LENGTH:
                raise InputError(f"a word expands to more than {_MAX_WORD_LENGTH} characters")
        return Word(text, tuple(dict.fromkeys(unknown)), spreads, certain)

    def _value(self, piece: Piece) -> tuple[list[Word], bool]:
        """What a variable holds or a command would print, and whether it is referred to as an array."""
        if piece.kind == "command":
            match = _OWN_FOLDER.fullmatch(piece.text)
            if match and self.folder is not None:
                own = self.folder.joinpath(*[".."] * (match["up"] or "").count("/.."))
                return [Word(str(own))], False
            shown = " ".join(piece.text.split())
            name = f"$({shown[:37]}...)" if len(shown) > 40 else f"$({shown})"
            is_number = piece.text.startswith("(")  # $((arithmetic))
            return [Word(name, (name,), spreads=not piece.quoted and not is_number)], False
        name = f"${{{piece.text}}}"
        match = _REFERENCE.fullmatch(piece.text)
        is_array = bool(match and match[2]) or piece.text in ("@", "*")
        held = self._scope.get(match[1]) if match else None
        if held is None:
            return [Word(name, (name,), spreads=is_array or not piece.quoted)], is_array
        if not is_array and (len(held) > 1 or any(not word.certain for word in held)):
            # One of several values, by the branch taken: not one that can be told.
            return [Word(name, (name,), spreads=not piece.quoted)], False
        return held, is_array
