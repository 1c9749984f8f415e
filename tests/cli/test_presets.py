"""The presets: sizes that people know by heart, and, where slime's tree is at hand, those of the files they cite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compact_logits.cli.launch_flags import Flags, read_flags
from compact_logits.cli.launch_script import read_launch_script
from compact_logits.cli.presets import PRESETS, Preset, find_preset
from compact_logits.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "vocab", "hidden", "tied"),
    [
        ("qwen3.5-9b", 248320, 4096, False),
        ("Qwen3-4B", 151936, 2560, True),
        ("glm4.5-355b-a32b", 151552, 5120, False),
        ("deepseek-v3", 129280, 7168, False),
    ],
)
def test_well_known_sizes(name: str, vocab: int, hidden: int, tied: bool) -> None:
    preset = find_preset(name)
    assert (preset.vocab, preset.hidden, preset.tied) == (vocab, hidden, tied)


def test_names_are_unique_and_each_preset_says_its_source() -> None:
    names = [preset.name for preset in PRESETS]
    assert len(set(names)) == len(names)
    for preset in PRESETS:
        assert preset.name == preset.name.lower()
        assert preset.source.startswith("THUDM/slime 624b824a8 scripts/models/") and preset.source.endswith(".sh")


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"--preset must be one of qwen2\.5-0\.5b, .*llama3\.2-3b, got 'gpt-2'"):
        find_preset("gpt-2")


def flags_of(path: Path, folder: Path) -> Flags:
    script = folder / "launch.sh"
    script.write_text(f'source "{path}"\npython train.py ${{MODEL_ARGS[@]}}\n')
    return read_flags(read_launch_script(script))


@pytest.mark.skipif(not os.environ.get("SLIME_ROOT"), reason="SLIME_ROOT does not name slime's source tree")
@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_the_cited_file_says_so(preset: Preset, tmp_path: Path) -> None:
    flags = flags_of(Path(os.environ["SLIME_ROOT"]) / preset.source.split()[-1], tmp_path)

    def number(flag: str, default: int | None = None) -> int | None:
        uses = flags.uses(flag)
        return int(uses[-1].values[0].text) if uses else default

    assert number("--vocab-size") == preset.vocab
    assert number("--hidden-size") == preset.hidden
    assert number("--make-vocab-size-divisible-by", 128) == preset.vocab_multiple
    assert preset.tied == (not flags.uses("--untie-embeddings-and-output-weights"))
