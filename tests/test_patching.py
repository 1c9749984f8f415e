"""Patches of modules and classes: in place everywhere, and gone without a trace."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

import pytest

from compact_logits.errors import PatchError
from compact_logits.patching import MARKER, Patch, PatchSet
from tests.support.patched_modules import SOURCE, USER, louder, make_module


@pytest.fixture
def source(monkeypatch):
    return make_module(monkeypatch, "patched_source", SOURCE)


@pytest.fixture
def user(monkeypatch, source):
    return make_module(monkeypatch, "patched_user", USER)


def _refused(text: str):
    return pytest.raises(PatchError, match=re.escape(text))


def test_a_patch_reaches_every_name_and_its_revert_restores_each(source, user):
    original = source.speak
    patch = Patch(source, "speak", louder, requires=["word"])
    assert source.speak is original, "nothing happens before apply"
    patch.apply()
    assert source.speak("a", 2) == user.speak("a", 2) == user.s("a", 2) == "aa!"
    assert source.speak is user.s is patch.wrapper
    patch.revert()
    assert source.speak is user.speak is user.s is original
    assert not patch.applied and not hasattr(original, MARKER)


def test_the_wrapper_says_what_it_wraps(source):
    original = source.speak
    original.note = "kept"
    patch = Patch(source, "speak", louder)
    patch.apply()
    assert source.speak.__wrapped__ is original
    assert getattr(source.speak, MARKER) is patch
    assert (source.speak.__name__, source.speak.__doc__, source.speak.note) == ("speak", "Say it.", "kept")
    patch.revert()


def test_applying_twice_is_once_and_reverting_twice_is_once(source, user):
    original = source.speak
    patch = Patch(source, "speak", louder)
    patch.apply()
    patch.apply()
    assert user.speak("a") == "a!", "twice would say a!!"
    patch.revert()
    assert source.speak is original
    patch.revert()
    assert source.speak is original and user.speak("a") == "a"


def test_a_hundred_rounds_leave_the_modules_as_they_were(source, user):
    class Owner:
        def speak(self, word):
            return word

    class Heir(Owner):
        pass

    patches = PatchSet(Patch(source, "speak", louder), Patch(Owner, "speak", louder), Patch(Heir, "other", louder))
    Owner.other = Owner.speak
    before = [list(vars(place).items()) for place in (source, user, Owner, Heir)]
    for _ in range(100):
        patches.apply()
        assert (source.speak("a"), Owner().speak("a"), Heir().other("a")) == ("a!", "a!", "a!")
        patches.revert()
    after = [list(vars(place).items()) for place in (source, user, Owner, Heir)]
    for old, new in zip(before, after, strict=True):
        assert [key for key, _ in old] == [key for key, _ in new], "the same names in the same order"
        assert all(a is b for (_, a), (_, b) in zip(old, new, strict=True))


def test_revert_reaches_who_imported_the_wrapper_later(monkeypatch, source):
    original = source.speak
    patch = Patch(source, "speak", louder)
    patch.apply()
    late = make_module(monkeypatch, "patched_late", "from patched_source import speak as borrowed\n")
    assert late.borrowed("a") == "a!"
    patch.revert()
    assert late.borrowed is original


def test_revert_reaches_a_module_that_has_left_since(monkeypatch, source, user):
    original = source.speak
    patch = Patch(source, "speak", louder)
    patch.apply()
    monkeypatch.delitem(sys.modules, "patched_user")
    patch.revert()
    assert user.speak is original


def test_a_module_that_nobody_registered_is_patched_too(monkeypatch, source):
    monkeypatch.delitem(sys.modules, "patched_source")
    original = source.speak
    patch = Patch(source, "speak", louder)
    patch.apply()
    assert source.speak("a") == "a!"
    patch.revert()
    assert source.speak is original


def test_odd_and_lazy_modules_are_left_asleep(monkeypatch, source, tmp_path):
    class Awake(RuntimeError):
        pass

    class Sleeping(ModuleType):
        def __getattribute__(self, name):
            raise Awake(name)

    class NoModule:
        def __getattribute__(self, name):
            raise Awake(name)

    (tmp_path / "patched_lazy.py").write_text("raise AssertionError('the scan has imported a lazy module')\n")
    spec = importlib.util.spec_from_file_location("patched_lazy", tmp_path / "patched_lazy.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    oddities = {
        "none": None,
        "number": 3,
        "no_module": NoModule(),
        "sleeping": Sleeping("sleeping"),
        "lazy": lazy,
        "alias": source,
        "bare": ModuleType.__new__(ModuleType),
    }
    for name, odd in oddities.items():
        monkeypatch.setitem(sys.modules, f"patched_{name}", odd)
    original = source.speak
    patch = Patch(source, "speak", louder)
    patch.apply()
    assert source.speak("a") == "a!"
    patch.revert()
    assert source.speak is original
    assert type(lazy) is not ModuleType, "still unloaded"


def test_a_method_is_patched_where_it_is_named_and_an_inherited_one_is_deleted_again():
    class Owner:
        def speak(self, word):
            return word

    class Heir(Owner):
        pass

    original = vars(Owner)["speak"]
    heir = Patch(Heir, "speak", louder, requires=["word"])
    heir.apply()
    assert (Owner().speak("a"), Heir().speak("a")) == ("a", "a!")
    heir.revert()
    assert "speak" not in vars(Heir) and vars(Owner)["speak"] is original

    owner = Patch(Owner, "speak", louder)
    owner.apply()
    assert (Owner().speak("a"), Heir().speak("a")) == ("a!", "a!")
    with _refused("Heir.speak is patched by compact_logits already"):
        heir.apply()
    owner.revert()
    assert vars(Owner)["speak"] is original


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_static_and_class_methods_stay_what_they_are(kind):
    class Owner:
        speak = kind(lambda *args: args[-1])

    raw = vars(Owner)["speak"]
    patch = Patch(Owner, "speak", louder)
    patch.apply()
    assert type(vars(Owner)["speak"]) is kind
    assert Owner.speak("a") == Owner().speak("a") == "a!"
    patch.revert()
    assert vars(Owner)["speak"] is raw


def test_a_class_method_that_is_built_in_stays_one():
    """As `torch.autograd.Function.apply` is on torch 2.15."""

    class Owner(dict):
        pass

    def counted(original):
        return lambda cls, keys: (cls, len(original(cls, keys)))

    patch = Patch(Owner, "fromkeys", counted)
    patch.apply()
    assert Owner.fromkeys("ab") == Owner().fromkeys("ab") == (Owner, 2)
    patch.revert()
    assert "fromkeys" not in vars(Owner) and Owner.fromkeys("ab") == {"a": None, "b": None}


def test_a_set_is_applied_as_a_whole_or_not_at_all(source, user):
    before = dict(vars(source)), dict(vars(user))
    failing = PatchSet(Patch(source, "speak", louder), Patch(user, "absent", louder))
    with _refused("patched_user.absent"):
        failing.apply()
    assert (dict(vars(source)), dict(vars(user))) == before
    assert not failing.applied


def test_a_failing_set_leaves_what_was_applied_before(source):
    earlier = Patch(source, "speak", louder)
    earlier.apply()
    with _refused("patched_source.absent"):
        PatchSet(earlier, Patch(source, "absent", louder)).apply()
    assert earlier.applied and source.speak("a") == "a!"
    earlier.revert()


def test_a_set_is_reverted_as_a_whole_or_not_at_all(monkeypatch, source):
    other = make_module(monkeypatch, "patched_other", "def shout(word):\n    return word.upper()\n")
    patches = PatchSet(Patch(source, "speak", louder), Patch(other, "shout", louder))
    patches.apply()
    patches.apply()
    assert patches.applied and source.speak("a") == "a!" and other.shout("a") == "A!"
    ours, source.speak = source.speak, len
    with _refused(
        "patched_source.speak: it was patched by compact_logits and is now an object of builtins.builtin_fun"
    ):
        patches.revert()
    assert other.shout("a") == "A!", "the other patch is still there"
    source.speak = ours
    patches.revert()
    assert (source.speak("a"), other.shout("a")) == ("a", "A") and not patches.applied


def test_a_set_is_reverted_in_reverse_order(source):
    class Watched(Patch):
        def revert(self):
            order.append(self.name)
            super().revert()

    source.second = lambda word: word
    order: list[str] = []
    patches = PatchSet(Watched(source, "speak", louder), Watched(source, "second", louder))
    patches.apply()
    patches.revert()
    assert order == ["second", "speak"]
