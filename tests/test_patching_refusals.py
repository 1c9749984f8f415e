"""What a patch would have to guess at is refused, by name, and nothing is changed."""

from __future__ import annotations

import functools
import re

import pytest

from compact_logits.errors import PatchError
from compact_logits.patching import Patch
from tests.support.patched_modules import SOURCE, USER, louder, make_module


@pytest.fixture
def source(monkeypatch):
    return make_module(monkeypatch, "patched_source", SOURCE)


@pytest.fixture
def user(monkeypatch, source):
    return make_module(monkeypatch, "patched_user", USER)


def _refused(text: str):
    return pytest.raises(PatchError, match=re.escape(text))


def test_a_missing_parameter_is_named(source):
    with _refused(
        "needed the parameters voice, pitch of patched_source.speak, which takes (word, times); this version"
    ):
        Patch(source, "speak", louder, requires=["word", "voice", "pitch"]).apply()
    assert source.speak("a") == "a"


@pytest.mark.parametrize(
    ("code", "found"),
    [("", "nothing there"), ("speak = 3", "a int"), ("class speak: pass", "a type")],
)
def test_what_is_no_function_is_not_patched(monkeypatch, code, found):
    module = make_module(monkeypatch, "patched_other", code)
    with _refused(f"needed a function at patched_other.speak to patch, found {found}; is this version supported?"):
        Patch(module, "speak", louder).apply()


def test_a_module_attribute_made_on_demand_is_not_asked_for(monkeypatch):
    module = make_module(monkeypatch, "patched_other", "def __getattr__(name):\n    raise AssertionError(name)\n")
    with _refused("found nothing there"):
        Patch(module, "speak", louder).apply()


def test_a_function_without_a_signature_cannot_be_checked(monkeypatch):
    module = make_module(monkeypatch, "patched_other", "speak = getattr\n")
    with _refused("patched_other.speak has no signature to check"):
        Patch(module, "speak", louder, requires=["word"]).apply()


def test_a_second_patch_of_the_same_name_is_refused(source, user):
    first = Patch(source, "speak", louder)
    first.apply()
    with _refused("patched_source.speak is patched by compact_logits already; revert that patch first"):
        Patch(source, "speak", louder).apply()

    @functools.wraps(source.speak)
    def on_top(word):
        return first.wrapper(word)

    source.speak = on_top
    with _refused("patched_source.speak is patched by compact_logits already, below on_top ("):
        Patch(source, "speak", louder).apply()
    first.apply()  # still there, below: nothing to do
    source.speak = first.wrapper
    first.revert()


@pytest.mark.parametrize("place", ["source", "user"])
def test_revert_refuses_to_undo_what_somebody_else_put_on_top(source, user, place):
    original = source.speak
    module = {"source": source, "user": user}[place]
    patch = Patch(source, "speak", louder)
    patch.apply()

    def stranger(word):
        return "?"

    module.speak = stranger
    with _refused(
        f"cannot revert patched_{place}.speak: it was patched by compact_logits and is now stranger ("
    ) as who:
        patch.revert()
    assert __file__ in str(who.value), "names the file of who it was"
    assert module.speak is stranger and user.s is patch.wrapper, "a refused revert changes nothing"
    module.speak = patch.wrapper
    patch.revert()
    assert source.speak is user.speak is user.s is original


def test_a_name_that_was_deleted_meanwhile_is_not_brought_back(source, user):
    patch = Patch(source, "speak", louder)
    patch.apply()
    del user.s
    with _refused("cannot revert patched_user.s: it was patched by compact_logits and is now gone"):
        patch.revert()
    user.s = patch.wrapper
    patch.revert()


def test_applying_again_notices_that_the_patch_has_been_replaced(source):
    original = source.speak
    patch = Patch(source, "speak", louder)
    patch.apply()
    source.speak = lambda word: word
    with _refused("patched_source.speak was patched by compact_logits and is now <lambda> (") as caught:
        patch.apply()
    assert "), which does not say that it wraps the patch; undo that, or revert this patch" in str(caught.value)
    source.speak = original
    patch.revert()
    assert source.speak is original, "where the original is back already, there is nothing to undo"
    patch.apply()
    assert source.speak("a") == "a!"
    patch.revert()


def test_a_property_is_not_a_function():
    class Owner:
        @property
        def speak(self):
            return "a"

    with _refused("Owner.speak to patch, found a property"):
        Patch(Owner, "speak", louder).apply()


def test_a_method_with_somebody_elses_patch_on_top_is_not_restored():
    class Owner:
        def speak(self, word):
            return word

    patch = Patch(Owner, "speak", louder)
    patch.apply()
    Owner.speak = lambda self, word: "?"
    with _refused("Owner.speak: it was patched by compact_logits and is now <lambda> ("):
        patch.revert()
