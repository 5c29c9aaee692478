"""Flags and variables made from the settings dataclasses."""

from __future__ import annotations

import dataclasses
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.options import flag, settings_options, to_argv, variable
from kvferry.protocol.settings import RouterSettings, ServeSettings, WorkerSettings

CLASSES = [RouterSettings, WorkerSettings, ServeSettings]


def parse(cls: type, argv: list[str], env: dict[str, str] | None = None, fixed: dict | None = None) -> Any:
    """What a command with these options is called with."""

    @click.command()
    @settings_options(cls, fixed)
    def command(settings: Any) -> Any:
        return settings

    with pytest.MonkeyPatch.context() as patch:
        for name, text in (env or {}).items():
            patch.setenv(name, text)
        return command.main(argv, standalone_mode=False)


def values(field: dataclasses.Field) -> st.SearchStrategy:
    least, most = field.metadata["min"], field.metadata["max"]
    if field.metadata["choices"]:
        return st.sampled_from(field.metadata["choices"])
    if isinstance(field.default, bool):
        return st.booleans()
    if isinstance(field.default, int):
        return st.integers(-(10**6) if least is None else int(least), 10**6 if most is None else int(most))
    if isinstance(field.default, tuple):
        return st.lists(words(), min_size=len(field.default)).map(tuple)
    if isinstance(field.default, float):
        return st.floats(least, most, allow_nan=False, allow_infinity=False)
    return words()


def words() -> st.SearchStrategy:
    return st.text(st.characters(codec="utf-8", exclude_characters="\0"))


def all_settings(cls: type) -> st.SearchStrategy:
    return st.builds(cls, **{field.name: values(field) for field in dataclasses.fields(cls)})


@pytest.mark.parametrize("cls", CLASSES)
def test_without_flags_the_defaults_hold(cls):
    assert parse(cls, []) == cls()


@given(st.sampled_from(CLASSES).flatmap(all_settings))
def test_every_setting_survives_the_command_line(settings):
    assert parse(type(settings), to_argv(settings)) == settings


def test_every_setting_can_come_from_its_variable():
    for field in dataclasses.fields(WorkerSettings):
        kind = type(field.default)
        value: Any = {bool: not field.default, int: 1, float: 0.5, str: "x", tuple: ("x", "y")}[kind]
        value = max(value, field.metadata["min"] or 0.0) if kind is float else value
        value = field.metadata["choices"][0] if field.metadata["choices"] else value
        text = " ".join(value) if isinstance(value, tuple) else str(value)
        settings = parse(WorkerSettings, [], {variable(field.name): text})
        assert getattr(settings, field.name) == value
        assert settings == dataclasses.replace(WorkerSettings(), **{field.name: value})


def test_a_flag_beats_its_variable_and_an_empty_variable_is_none():
    assert parse(RouterSettings, ["--port", "1"], {"KVFERRY_PORT": "2"}).port == 1
    assert parse(RouterSettings, [], {"KVFERRY_PORT": "2"}).port == 2
    assert parse(RouterSettings, [], {"KVFERRY_PORT": ""}).port == 8000


@pytest.mark.parametrize(("text", "expected"), [("1", True), ("true", True), ("0", False), ("no", False)])
def test_switches(text, expected):
    assert parse(WorkerSettings, [], {"KVFERRY_ENABLE_PREFIX_CACHING": text}).enable_prefix_caching is expected
    assert parse(WorkerSettings, ["--no-enable-prefix-caching"]).enable_prefix_caching is False


@pytest.mark.parametrize(
    ("cls", "argv", "word"),
    [
        (RouterSettings, ["--port", "http"], "--port"),
        (RouterSettings, ["--port", "65536"], "65535"),
        (RouterSettings, ["--max-inflight", "0"], "--max-inflight"),
        (RouterSettings, ["--log-level", "loud"], "warning"),
        (WorkerSettings, ["--dtype", "int3"], "bfloat16"),
        (WorkerSettings, ["--verify-checksums", "1.5"], "--verify-checksums"),
        (WorkerSettings, ["--verify-checksums", "nan"], "--verify-checksums"),
        (WorkerSettings, ["--kv-cache-gib", "-1"], "--kv-cache-gib"),
        (WorkerSettings, ["--kv-cache-gib", "inf"], "--kv-cache-gib"),
        (WorkerSettings, ["--kv-host-gib", "inf"], "--kv-host-gib"),
        (WorkerSettings, ["--kv-disk-gib", "nan"], "--kv-disk-gib"),
        (WorkerSettings, ["--kv-disk-gib", "inf"], "0.001<=x<=1048576"),
        (ServeSettings, ["--kv-remote-gib", "inf"], "--kv-remote-gib"),
        (ServeSettings, ["--decode", "0"], "--decode"),
    ],
)
def test_a_bad_value_names_flag_or_bound(cls, argv, word):
    with pytest.raises(click.UsageError) as caught:
        parse(cls, argv)
    assert word in caught.value.format_message()


def test_a_bad_variable_is_named():
    with pytest.raises(click.UsageError) as caught:
        parse(RouterSettings, [], {"KVFERRY_PORT": "http"})
    assert "KVFERRY_PORT" in caught.value.format_message()


def test_fixed_fields_are_no_flags_and_ignore_their_variables():
    settings = parse(WorkerSettings, [], {"KVFERRY_ROLE": "decode"}, fixed={"role": "prefill"})
    assert settings.role == "prefill"
    with pytest.raises(click.NoSuchOption):
        parse(WorkerSettings, ["--role", "decode"], fixed={"role": "prefill"})


@pytest.mark.parametrize(
    ("argv", "env", "kernels", "warned"),
    [
        (["--attention", "cpu"], {}, "cpu", True),
        ([], {"KVFERRY_ATTENTION": "reference"}, "reference", True),
        (["--kernels", "cpu"], {"KVFERRY_ATTENTION": "reference"}, "cpu", False),
        (["--kernels", "cpu", "--attention", "reference"], {}, "cpu", False),
        (["--attention", "cpu"], {"KVFERRY_KERNELS": "reference"}, "cpu", True),
        ([], {"KVFERRY_ATTENTION": "cpu", "KVFERRY_KERNELS": "reference"}, "reference", False),
        (["--attention", "auto"], {"KVFERRY_KERNELS": "reference"}, "auto", True),
        ([], {}, "auto", False),
    ],
)
@pytest.mark.parametrize("cls", [WorkerSettings, ServeSettings])
def test_a_former_name_is_understood_with_one_line_of_warning(cls, argv, env, kernels, warned, capsys):
    assert parse(cls, argv, env).kernels == kernels
    err = capsys.readouterr().err
    assert err.splitlines() == (
        ["--attention was renamed to --kernels (KVFERRY_ATTENTION: KVFERRY_KERNELS)"] if warned else []
    )


def test_a_former_name_takes_no_other_values_and_is_not_offered(capsys):
    with pytest.raises(click.UsageError, match="flash"):
        parse(WorkerSettings, ["--attention", "flash"])
    parse(WorkerSettings, ["--help"])
    shown = capsys.readouterr().out
    assert "--kernels" in shown
    assert "attention" not in shown.lower()


@pytest.mark.parametrize("cls", [WorkerSettings, ServeSettings])
def test_a_short_flag_is_the_same_flag(cls):
    assert parse(cls, ["-tp", "2"]).tensor_parallel_size == 2
    assert parse(cls, ["--tensor-parallel-size", "3"]).tensor_parallel_size == 3
    with pytest.raises(click.UsageError, match="not in the range 1<=x<=64"):
        parse(cls, ["-tp", "0"])


def test_names():
    assert flag("max_num_seqs") == "--max-num-seqs"
    assert variable("max_num_seqs") == "KVFERRY_MAX_NUM_SEQS"
    assert to_argv(WorkerSettings(enable_prefix_caching=False, threads=3, model="a b"), skip={"threads"}) == [
        "--model",
        "a b",
        "--no-enable-prefix-caching",
    ]
