"""A frozen dataclass of settings as command-line flags.

Every field of the dataclass is one flag; the help, the group and the known names come from the
field itself:

    @dataclasses.dataclass(frozen=True)
    class Config:
        kernel: str = setting("llops", "feature map", group="model", choices=tuple(FEATURE_MAPS))
        learning_rate: float = setting(1e-3, "peak learning rate", group="optimizer")

    config = parse(Config, sys.argv)
"""

import ast
import dataclasses
import difflib
import hashlib
import inspect
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from absl import flags

C = TypeVar("C")
_DEFINE = {
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_boolean,
    str: flags.DEFINE_string,
}


def setting(
    default: Any,
    help: str,
    *,
    group: str = "general",
    choices: Sequence[str] | None = None,
    changes_result: bool = True,
) -> Any:
    """A dataclass field that is a flag.

    Args:
        default: the value without a preset or a flag.
        help: one line, with the unit.
        group: the heading in `--help`.
        choices: the known names of a str field.
        changes_result: False for what may differ between two runs of the same experiment (a folder,
            how often to log); such a field is left out of `config_hash` and may change on resume.
    """
    metadata = {"help": help, "group": group, "choices": choices, "changes_result": changes_result}
    return dataclasses.field(default=default, metadata=metadata)


def parse(
    config_type: type[C],
    argv: Sequence[str],
    preset: Callable[[C], Mapping[str, Any]] | None = None,
) -> C:
    """The settings that a command line asks for.

    Resolution order: the field's default, then `preset`, then flags that were given. In a flag's
    name `-` and `_` are the same.

    Args:
        config_type: a frozen dataclass whose fields are made by `setting`, each of type int, float,
            bool, str, or one of them `| None`.
        argv: the command line, the program's name first.
        preset: given the settings without a preset, returns the values that the preset sets.

    Returns:
        The settings. `--help` and `--print-config` print and exit with 0 instead; an unknown flag,
        an unknown name, a malformed value and a ValueError of `config_type` or of `preset` print
        one message on stderr and exit with 2.
    """
    values = flags.FlagValues()
    flags.DEFINE_boolean("help", False, "print this and exit", flag_values=values)
    flags.DEFINE_boolean("print_config", False, "print the settings and exit", flag_values=values)
    for field in dataclasses.fields(config_type):  # type: ignore[arg-type]
        _define(config_type, field, values)
    try:
        rest = values([argv[0], *map(_underscored, argv[1:])])
    except flags.UnrecognizedFlagError as error:
        _exit_unknown(error.flagname, config_type)
    except (flags.Error, ValueError) as error:
        _exit(str(error))
    if rest[1:]:
        _exit(f"unexpected argument {rest[1]!r}: settings are given as --name=value")
    if values["help"].value:
        print(_help(config_type))
        sys.exit(0)
    names = [field.name for field in dataclasses.fields(config_type)]  # type: ignore[arg-type]
    given = {name: values[name].value for name in names if values[name].present}
    try:
        config = config_type(**given)
        if preset is not None:
            config = config_type(**{**preset(config), **given})
    except ValueError as error:
        _exit(str(error))
    if values["print_config"].value:
        print(format_config(config))
        sys.exit(0)
    return config


def to_dict(config: Any, *, changes_result: bool | None = None) -> dict[str, Any]:
    """The settings by name; with `changes_result`, only the fields that have this value of it."""
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if changes_result in (None, field.metadata.get("changes_result", True))
    }


def format_config(config: Any) -> str:
    """Sorted `name = value` lines."""
    return "\n".join(f"{name} = {value}" for name, value in sorted(to_dict(config).items()))


def config_hash(config: Any) -> str:
    """12 hexadecimal digits that name the settings which change the result.

    They are the first of the sha256 of the canonical JSON of the settings that
    `to_dict(config, changes_result=True)` gives.
    """
    text = json.dumps(to_dict(config, changes_result=True), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def parse_options(setting: str, text: str) -> dict[str, Any]:
    """Turn `name=value,name=value` into keyword arguments; values are Python literals or words.

    Raises:
        ValueError: naming the setting, if a part has no `=`.
    """
    options = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{setting}={text!r}: {part!r} is not of the form name=value.")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def _define(config_type: type, field: dataclasses.Field, values: flags.FlagValues) -> None:
    default: Any = field.default
    about, choices = field.metadata["help"], field.metadata["choices"]
    if choices is not None:
        flags.DEFINE_enum(field.name, default, list(choices), about, flag_values=values)
    else:
        define: Any = _DEFINE[_kind(config_type, field.name)]
        define(field.name, default, about, flag_values=values)


def _kind(config_type: type, name: str) -> type:
    """The type of a field, without `| None`."""
    hint = typing.get_type_hints(config_type)[name]
    if isinstance(hint, types.UnionType):
        (hint,) = (member for member in typing.get_args(hint) if member is not types.NoneType)
    if hint not in _DEFINE:
        raise TypeError(
            f"{config_type.__name__}.{name}: expected int, float, bool or str, got {hint}."
        )
    return hint


def _underscored(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name[:2] + name[2:].replace("-", "_") + equals + value if name[:2] == "--" else argument


def _help(config_type: type) -> str:
    lines = [inspect.cleandoc(config_type.__doc__ or ""), ""]
    groups: dict[str, list[str]] = {}
    for field in dataclasses.fields(config_type):
        choices = field.metadata["choices"]
        known = f" ({' | '.join(choices)})" if choices else ""
        text = f"  --{field.name}={field.default}"
        groups.setdefault(field.metadata["group"], []).append(
            f"{text:<34} {field.metadata['help']}{known}"
        )
    groups["other"] = [
        f"{'  --print-config':<34} print the resolved settings and exit",
        f"{'  --help':<34} print this and exit",
    ]
    for group, rows in groups.items():
        lines += [f"{group}:", *rows, ""]
    return "\n".join(lines).rstrip()


def _exit_unknown(name: str, config_type: type) -> NoReturn:
    known = [field.name for field in dataclasses.fields(config_type)]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean --{near[0]}?" if near else ""
    _exit(f"unknown flag --{name}{hint} Known flags: {', '.join(known)}.")


def _exit(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
