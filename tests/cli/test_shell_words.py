"""Rarer turns of a shell script, each held against what bash itself hands to the training script."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from compact_logits.cli.launch_script import read_launch_script

BASH = shutil.which("bash")
SCRIPTS = {
    "a here-string": 'cat <<< "train.py --in-a-here-string" > /dev/null\npython3 train.py --a 1\n',
    "arithmetic commands": "((n = 1 + 2)) || true\nfor ((i = 0; i < 2; i++)); do :; done\npython3 train.py --a 1\n",
    "escapes in quotes": 'python3 train.py --a "b \\"c\\" \\\\ \\$d" --e "f\\\ng"\n',
    "a quoted line after another": "python3 train.py --a 'b\nc' \\\n  --d e\\ f\n",
    "quotes with a dollar before": "python3 train.py --a $'b c' --d\n",
    "dollars that name nothing": "python3 train.py --cost 5$ --other \"$ 6\" --third '$7'\n",
    "a here-document that is not ended": "python3 train.py --a 1\ncat <<EOF > /dev/null\npython3 train.py --b 2\n",
    "an indented here-document": "cat <<-EOF > /dev/null\n\tpython3 train.py --b\n\tEOF\npython3 train.py --a\n",
    "redirections around": "exec 11>&1\n2> /dev/null python3 train.py --a 1 --b 2>&1 --c <&- --d 10>&- --e >&11 --f\n",
    "a process substitution": "cat < <(echo python3 train.py) > /dev/null\npython3 train.py --a 1\n",
    "an array element by element": "A=(--a)\nA+=(--b 'c d')\nA+=(\n)\npython3 train.py \"${A[@]}\" x\n",
    "what a name begins with": "A=b\nAB=c\npython3 train.py --a $A/x --b ${A}B --c $AB\n",
    "a variable that was unset": "A='--gone'\nunset A\nA=--here\npython3 train.py $A\n",
}


@pytest.mark.skipif(BASH is None, reason="there is no bash")
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_the_words_are_those_of_bash(tmp_path: Path, script: str) -> None:
    path = tmp_path / "run.sh"
    path.write_text(script)
    spoken = tmp_path / "python3"
    spoken.write_text('#!/bin/bash\nshift\nprintf "%s\\0" "$@"\n')
    spoken.chmod(0o755)
    call = [str(BASH), "-c", f'PATH="{tmp_path}:$PATH" bash "{path}"']
    said = subprocess.run(call, capture_output=True, cwd=tmp_path, timeout=60, check=True).stdout
    launch = read_launch_script(path)
    assert all(word.certain and not word.unknown for word in launch.words) and launch.notes == []
    assert [word.text for word in launch.words] == said.decode().split("\0")[:-1]


def test_a_setting_that_the_script_exports_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("export COMPACT_LOGITS=strict\nCOMPACT_LOGITS_COMPILE=1\npython3 train.py --a\n")
    assert read_launch_script(path).settings == {"COMPACT_LOGITS": "strict", "COMPACT_LOGITS_COMPILE": "1"}


def test_what_bash_would_refuse_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("A=(--a <) >\necho ((\n))\npython3 train.py ${A[@]} B=(--b c) --d\n")
    assert [word.text for word in read_launch_script(path).words] == ["--a", "B=", "--d"]
