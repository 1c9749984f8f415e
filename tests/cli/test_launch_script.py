"""What a launch script gives to the training script, read as bash would expand it; what can't be read is named."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from compact_logits.cli.launch_flags import Flags, read_flags
from compact_logits.cli.launch_script import MAX_SCRIPT_BYTES, Launch, read_arguments, read_launch_script
from compact_logits.errors import InputError

SCRIPT = r"""#!/bin/bash
# --in-a-comment 1
set -ex
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${HERE}/model.sh"
LR=1e-6; NAME="a b"
OPT_ARGS=(
   --lr ${LR}   # the rate
   # --commented-out 2
   --name "${NAME}" --quoted 'single $NAME' --split $NAME
)
OPT_ARGS+=(--more "x#y" --escaped a\ b)
EMPTY=()
cat <<EOF > /dev/null
python train.py --in-a-here-document
EOF
for i in 1 2; do echo "$i" >/dev/null; done
echo "python train.py --in-an-echo" 2>&1 | tee log >/dev/null
ray job submit --runtime-env-json='{"env_vars": {"COMPACT_LOGITS": "1"}}' -- python3 train.py \
   --first 1 ${OPT_ARGS[@]} \
   "${MODEL_ARGS[@]}" ${EMPTY[@]} --equals=3 --list 1 2 3
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "model.sh").write_text("MODEL_ARGS=(\n --hidden-size 8 --kind '[0]*3' \n)\n")
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    return path


def texts(launch: Launch) -> list[str]:
    return [word.text for word in launch.words]


def read(folder: Path, text: str) -> Launch:
    path = folder / "run.sh"
    path.write_text(text)
    return read_launch_script(path)


def flags(text: str) -> Flags:
    return read_flags(read_arguments(text))


def test_the_words_are_those_that_bash_itself_passes(script: Path, tmp_path: Path) -> None:
    launch = read_launch_script(script)
    assert launch.notes == [] and all(word.certain and not word.unknown for word in launch.words)
    assert launch.settings == {"COMPACT_LOGITS": "1"}
    bash = shutil.which("bash")
    assert bash is not None
    # The same script, with a `ray` that prints what comes after train.py.
    (tmp_path / "ray").write_text(
        '#!/bin/bash\nwhile [ "$1" != train.py ]; do shift; done; shift; printf "%s\\n" "$@"\n'
    )
    (tmp_path / "ray").chmod(0o755)
    call = [bash, "-c", f'PATH="{tmp_path}:$PATH" bash "{script}" 2>/dev/null']
    said = subprocess.run(call, capture_output=True, text=True, check=True, cwd=tmp_path, timeout=60).stdout
    expected = said.splitlines()[said.splitlines().index("--first") :]
    assert texts(launch) == expected


def test_nothing_is_executed(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    launch = read(tmp_path, f"touch {trap}\nX=$(touch {trap}) `touch {trap}`\npython train.py --x $X `touch {trap}`\n")
    assert not trap.exists()
    assert [bool(word.unknown) for word in launch.words] == [False, True, True]


def test_unknown_parts_are_named_and_never_guessed(tmp_path: Path) -> None:
    launch = read(
        tmp_path,
        'N=${N:-8}\nDIR="${BASE}/data"\n'
        'python train.py --n ${N} --dir $DIR/x --k $((2 * 3)) ${EXTRA[@]} "$@" --q "${Q}"\n',
    )
    found = {word.text: (word.unknown, word.spreads) for word in launch.words if word.unknown}
    assert found == {
        "${N:-8}": (("${N:-8}",), True),
        "${BASE}/data/x": (("${BASE}",), False),
        "$((2 * 3))": (("$((2 * 3))",), False),
        "${EXTRA[@]}": (("${EXTRA[@]}",), True),
        "${@}": (("${@}",), True),
        "${Q}": (("${Q}",), False),
    }
    assert read_flags(launch).open_ends == ("${EXTRA[@]}", "${@}")


def test_what_a_branch_assigns_is_not_certain(tmp_path: Path) -> None:
    launch = read(
        tmp_path,
        """A=(--always 1); V=1
if [ "$X" ]; then
  A+=(--maybe 2); V=2
  B=(--only-then 3)
else
  B=(--otherwise 4)
fi
[ -d x ] && A+=(--and 5)
[ -d x ] || A+=(--or 6)
f() { A+=(--in-a-function 7); }
case $Y in a) A+=(--in-a-case 8);; esac
python train.py ${A[@]} ${B[@]} --v $V --last 9
""",
    )
    certain = {word.text: word.certain for word in launch.words if word.text.startswith("--")}
    assert {name for name, sure in certain.items() if sure} == {"--always", "--v", "--last"}
    assert set(certain) >= {"--maybe", "--only-then", "--otherwise", "--and", "--or", "--in-a-function", "--in-a-case"}
    assert launch.words[launch.words.index(next(w for w in launch.words if w.text == "--v")) + 1].unknown == ("${V}",)


def test_sourced_files_and_forgotten_backslashes_are_noted(tmp_path: Path) -> None:
    launch = read(tmp_path, 'source /no/such.sh\n. "${WHERE}/x.sh"\nA=(--a)\npython train.py --x 1\n  ${A[@]} --y 2\n')
    assert texts(launch) == ["--x", "1"]
    assert launch.notes[0].startswith("sourced file /no/such.sh was not read: needed a readable launch script")
    assert launch.notes[1] == "sourced file ${WHERE}/x.sh was not read"
    assert "begins with --a after the training script's: is a \\ missing?" in launch.notes[2]
    twice = read(tmp_path, "python train.py --x 1\npython train_async.py --x 2\n")
    assert texts(twice) == ["--x", "1"] and "called in 2 places" in twice.notes[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"echo hello\n", "needed a call of train.py or train_async.py, found none"),
        (b"A=(--x\npython train.py\n", "line 1: an array's ( is never closed"),
        (b'python train.py --x "1\n', 'line 1: a " is never closed'),
        (b"X=${Y\npython train.py\n", "line 1: ${ is never closed"),
        (b"python train.py --x '1\n", "line 1: ' is never closed"),
        (b"echo\n((n = 1 + 2)\npython train.py\n", "line 2: (( is never closed, so the flags after it can't be told"),
        (b"#!/usr/bin/env python3\nimport os\n", "needed a bash script, got Python"),
        (b"\0" * 100, "needed a launch script of at most 1048576 bytes of text"),
        (b"x" * (MAX_SCRIPT_BYTES + 1), "at most 1048576 bytes of text"),
        (b"A=aaaaaaaaaaaaaaaa\n" + b'A="$A$A$A$A"\n' * 40 + b"python train.py $A\n", "expands to more than"),
        (
            b"A=(a a a a)\n" + b"A=(${A[@]} ${A[@]} ${A[@]} ${A[@]})\n" * 30 + b"python train.py\n",
            "its arrays expand to more than",
        ),
        (b"source run.sh\nsource ./run.sh\n", "found none"),
    ],
    ids=range(12),
)
def test_hostile_scripts_are_refused_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "run.sh"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_launch_script(path)
    assert said in str(caught.value) and str(path) in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


def test_a_folder_and_a_device_are_no_scripts(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(InputError, match="needed a file, got a folder or a device"):
            read_launch_script(path)
    with pytest.raises(InputError, match="needed a readable launch script: No such file"):
        read_launch_script(tmp_path / "none.sh")


def test_an_argument_string_is_read_like_a_command_line() -> None:
    assert texts(read_arguments("--a 1 \\\n --b 'two words'\n--c=3")) == ["--a", "1", "--b", "two words", "--c=3"]
    assert texts(read_arguments("python train.py --a 1")) == ["--a", "1"]
    assert texts(read_arguments("   ")) == []


def test_flags_have_the_words_up_to_the_next_flag() -> None:
    found = flags("--a 1 2 --switch --b=x=y --neg -0.1 --a 3")
    assert {name: [[w.text for w in use.values] for use in uses] for name, uses in found.given.items()} == {
        "--a": [["1", "2"], ["3"]],
        "--switch": [[]],
        "--b": [["x=y"]],
        "--neg": [["-0.1"]],
    }
    assert [[w.text for w in use.values] for use in found.uses("--a")] == [["3"]]
    assert found.uses("--absent") == []


def test_where_more_flags_may_hide() -> None:
    assert flags("--a ${X} --b /p/${Y} --c 1 /q/${Z}").open_ends == ()
    assert flags("${W} --a 1 ${X} --b ${Y[@]} --c=1 ${Z}").open_ends == ("${W}", "${X}", "${Y[@]}", "${Z}")
    assert flags('--a 1 "${X}"').open_ends == ()
