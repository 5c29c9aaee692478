"""Maps settings dataclasses to the command line: one flag and one variable per field, and back to arguments.

Types come from the defaults; help, choices and bounds come from the fields' metadata (`protocol.settings.setting`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from kvferry.protocol.common_settings import CommonSettings

Settings = TypeVar("Settings", bound=CommonSettings)
Decorated = Callable[..., Any]

ENV_PREFIX = "KVFERRY_"
_PRECEDENCE = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT)
"""Sources of a value; an earlier one takes precedence."""

SERVE_FIXED = {
    "role": "decode",
    "node_id": "",
    "link_port": 0,
    "advertise_host": "",
    "status_fd": -1,
    "cores_fd": -1,
    "weights_fd": -1,
    "pools_apart": False,
    "nnodes": 1,
    "node_rank": 0,
    "master_addr": "",
    "master_port": 29500,
    "respawned": False,
    "kv_events_config": "",
    "worker": -1,
    "workers_dir": "",
}
"""Settings that `serve` chooses for each child; it has no flags for them."""


def flag(name: str) -> str:
    """Return the flag of a setting: `max_num_seqs` → `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """Return the environment variable of a setting: `max_num_seqs` → `KVFERRY_MAX_NUM_SEQS`."""
    return ENV_PREFIX + name.upper()


def defaults(cls: type[CommonSettings], names: Collection[str]) -> dict[str, Any]:
    """Return the defaults of these fields, for a command that has no flags for them."""
    return {field.name: field.default for field in dataclasses.fields(cls) if field.name in names}


def settings_options(cls: type[Settings], fixed: Mapping[str, Any] | None = None) -> Callable[[Decorated], Decorated]:
    """Decorate a click command `f(settings: cls)`. Fields in `fixed` have no flag; they get these values."""
    given = dict(fixed or {})
    fields = [field for field in dataclasses.fields(cls) if field.name not in given]

    def decorate(function: Decorated) -> Decorated:
        def command(**values: Any) -> Any:
            for field in fields:
                _apply_former(field, values)
            return function(cls(**given, **values))

        command.__doc__ = function.__doc__
        command.__name__ = function.__name__
        for field in reversed(fields):
            command = _option(field)(command)
            if field.metadata["former"]:
                command = _former_option(field)(command)
        return command

    return decorate


def to_argv(settings: CommonSettings, skip: Collection[str] = ()) -> list[str]:
    """Return the flags from which a command parses these settings.

    It omits fields that equal their default and the fields in `skip`."""
    argv: list[str] = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name in skip or value == field.default:
            continue
        if isinstance(value, tuple):
            argv += [word for each in value for word in (flag(field.name), str(each))]
        elif isinstance(value, bool):
            argv.append(flag(field.name) if value else flag(f"no_{field.name}"))
        else:
            argv += [flag(field.name), str(value)]
    return argv


def _option(field: dataclasses.Field[Any]) -> Callable[[Decorated], Decorated]:
    names = flag(field.name)
    if isinstance(field.default, bool):
        names += "/" + flag(f"no_{field.name}")
    short = field.metadata["short"]
    return click.option(
        names,
        *([short] if short else []),
        field.name,
        type=_type(field),
        default=field.default,
        envvar=variable(field.name),
        help=field.metadata["help"],
        hidden=field.metadata["hidden"],
        multiple=isinstance(field.default, tuple),
        show_default=field.default not in ("", ()),
        show_envvar=True,
    )


def _former_option(field: dataclasses.Field[Any]) -> Callable[[Decorated], Decorated]:
    """Return the hidden option for a field's former flag and variable."""
    name = field.metadata["former"]
    return click.option(flag(name), name, type=_type(field), envvar=variable(name), hidden=True)


def _apply_former(field: dataclasses.Field[Any], values: dict[str, Any]) -> None:
    """Move a value given under a field's former name to the field, unless the new name has precedence.

    A flag takes precedence over a variable under either name; between two flags or variables the new name does."""
    name = field.metadata["former"]
    value = values.pop(name, None)
    source = click.get_current_context().get_parameter_source
    if value is None or _PRECEDENCE.index(source(field.name)) <= _PRECEDENCE.index(source(name)):
        return
    click.echo(f"{flag(name)} was renamed to {flag(field.name)} ({variable(name)}: {variable(field.name)})", err=True)
    values[field.name] = value


def _type(field: dataclasses.Field[Any]) -> Any:
    kind, meta = type(field.default), field.metadata
    if meta["choices"]:
        return click.Choice(meta["choices"])
    if kind is int and (meta["min"], meta["max"]) != (None, None):
        return click.IntRange(meta["min"], meta["max"])
    if kind is tuple:
        return str
    if kind is float:
        return _Number(meta["min"], meta["max"])
    return kind


class _Number(click.FloatRange):
    """Float within bounds; rejects `nan`."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


def router_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a command that talks to a running router: its URL and API key."""
    url = click.option(
        "--url", default="http://127.0.0.1:8000", show_default=True, help="the router's URL, without /v1"
    )
    key = click.option("--api-key", default="", envvar="KVFERRY_API_KEY", show_envvar=True, help="its API key, if any")
    return url(key(command))
