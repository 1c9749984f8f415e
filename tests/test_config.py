"""The configuration read from the environment: what it takes, and what it refuses."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from compact_logits.config import Config, parse_bytes
from compact_logits.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "mode", "enabled"),
    [
        (None, "off", False),
        ("", "off", False),
        ("0", "off", False),
        ("1", "on", True),
        ("strict", "strict", True),
        (" STRICT ", "strict", True),
    ],
)
def test_mode(value: str | None, mode: str, enabled: bool) -> None:
    config = Config.from_env({} if value is None else {"COMPACT_LOGITS": value})
    assert (config.mode, config.enabled, config.chunk_bytes) == (mode, enabled, None)


@pytest.mark.parametrize("value", ["true", "on", "yes", "2", "off", "-1", "strict1"])
def test_an_unknown_mode_names_the_valid_ones(value: str) -> None:
    with pytest.raises(ConfigError, match=f"COMPACT_LOGITS must be unset, 0, 1 or strict, got '{value}'"):
        Config.from_env({"COMPACT_LOGITS": value})


@pytest.mark.parametrize(
    ("text", "count"),
    [("1", 1), ("64MiB", 64 * 2**20), ("64 mib", 64 * 2**20), (" 3 KiB ", 3072), ("2GiB", 2**31), ("4096", 4096)],
)
def test_byte_counts(text: str, count: int) -> None:
    assert parse_bytes(text) == count
    assert Config.from_env({"COMPACT_LOGITS_CHUNK_BYTES": text}).chunk_bytes == count


@pytest.mark.parametrize(
    "text", ["", "0", "0MiB", "-1", "1.5MiB", "64MB", "64M", "MiB", "1 2", "1e6", "0x10", "8589934592GiB"]
)
def test_anything_else_is_no_byte_count(text: str) -> None:
    needed = "a byte count must be a positive whole number, or one with KiB, MiB or GiB, got "
    with pytest.raises(ConfigError, match=f"^{needed}'{text}'$"):
        parse_bytes(text)
    with pytest.raises(ConfigError, match=f"^COMPACT_LOGITS_CHUNK_BYTES: {needed}'{text}'$"):
        Config.from_env({"COMPACT_LOGITS_CHUNK_BYTES": text})


def test_a_number_longer_than_any_is_shown_in_part() -> None:
    assert parse_bytes(str(2**63 - 1)) == 2**63 - 1
    for call in (lambda: parse_bytes("9" * 10**4), lambda: Config.from_env({"COMPACT_LOGITS_CP_BALANCE": "9" * 10**4})):
        with pytest.raises(ConfigError, match=r"got '9{80}'\.\.\.$"):
            call()


each_switch = pytest.mark.parametrize(
    ("field", "unset"), [("cp_balance", False), ("check_ranks", None), ("fp32_logits", False)]
)


@each_switch
@pytest.mark.parametrize(("value", "on"), [(None, None), ("0", False), ("1", True), (" 1 ", True)])
def test_switches(field: str, unset: bool | None, value: str | None, on: bool | None) -> None:
    environ = {} if value is None else {f"COMPACT_LOGITS_{field.upper()}": value}
    assert getattr(Config.from_env(environ), field) is (unset if value is None else on)


@each_switch
@pytest.mark.parametrize("value", ["", "yes", "2", "true"])
def test_a_switch_is_0_or_1(value: str, field: str, unset: bool | None) -> None:
    name = f"COMPACT_LOGITS_{field.upper()}"
    with pytest.raises(ConfigError, match=f"^{name} must be unset, 0 or 1, got '{value}'$"):
        Config.from_env({name: value})


@pytest.mark.parametrize("value", ["1", "0", "", "anything"])
def test_a_setting_that_is_gone_warns_once_and_does_nothing(value: str) -> None:
    code = f"""
from compact_logits.config import Config
environ = {{"COMPACT_LOGITS_COMPILE": {value!r}, "COMPACT_LOGITS": "1"}}
assert Config.from_env(environ) == Config.from_env(environ) == Config(mode="on")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "COMPACT_LOGITS_COMPILE is gone" in done.stderr and done.stderr.count("\n") == 1


def test_a_mistyped_name_is_an_error_and_other_names_are_none() -> None:
    with pytest.raises(
        ConfigError,
        match="unknown environment variable COMPACT_LOGITS_CHUNKBYTES; "
        "the known ones are COMPACT_LOGITS, COMPACT_LOGITS_CHECK_RANKS, COMPACT_LOGITS_CHUNK_BYTES, "
        "COMPACT_LOGITS_CP_BALANCE, COMPACT_LOGITS_FP32_LOGITS",
    ):
        Config.from_env({"COMPACT_LOGITS": "1", "COMPACT_LOGITS_CHUNKBYTES": "1"})
    assert Config.from_env({"HOME": "/", "MY_COMPACT_LOGITS": "x"}) == Config()


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().mode = "on"  # type: ignore[misc]
