"""A launch's words as flags: which are given, with which values, and where more may hide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compact_logits.cli.launch_script import Launch, Word

__all__ = ["Flags", "Given", "read_flags"]


@dataclass(frozen=True)
class Given:
    """One use of a flag. `certain` is false where it stands in a branch that may not be taken."""

    values: tuple[Word, ...]
    certain: bool


@dataclass(frozen=True)
class Flags:
    """`given`: the uses of each flag in order, by its name with dashes. `open_ends`: what only running the script would
    tell, and what may turn out to be more flags."""

    given: dict[str, list[Given]]
    open_ends: tuple[str, ...]

    def uses(self, flag: str) -> list[Given]:
        """The uses of `flag` any of which may be the one that counts: the last certain one and all after it.

        A parser takes the last.
        """
        uses = self.given.get(flag, [])
        last = max((place for place, use in enumerate(uses) if use.certain), default=0)
        return uses[last:]


def read_flags(launch: Launch) -> Flags:
    """Sort the words into flags and their values, as argparse does: all words up to the next that begins with `--`.

    A part that only running the script would tell is taken for the value of the flag right before it; elsewhere, and
    where it is an array, it may hold flags of its own.
    """
    given: dict[str, list[Given]] = {}
    open_ends: dict[str, None] = {}
    words = launch.words
    place = 0
    while place < len(words):
        head = words[place]
        place += 1
        if not head.text.startswith("--"):
            open_ends.update(_may_hold_flags([head]))
            continue
        values: list[Word] = []
        while place < len(words) and not words[place].text.startswith("--"):
            values.append(words[place])
            place += 1
        name, equals, value = head.text.partition("=")
        if equals:
            open_ends.update(_may_hold_flags(values))
            values = [Word(value, head.unknown, certain=head.certain)]
        else:
            open_ends.update(_may_hold_flags(values[1:]))
            open_ends.update(dict.fromkeys(name for word in values[:1] if _is_array(word) for name in word.unknown))
        given.setdefault(name, []).append(Given(tuple(values), head.certain))
    return Flags(given, tuple(open_ends))


def _may_hold_flags(words: Sequence[Word]) -> dict[str, None]:
    # A path with a variable in it is a path.
    return dict.fromkeys(word.text for word in words if word.spreads and word.text in word.unknown)


def _is_array(word: Word) -> bool:
    return word.spreads and any(name.endswith(("[@]}", "[*]}")) or name in ("${@}", "${*}") for name in word.unknown)
