"""Turns declared dataclasses into options of a command: flags, environment variables and configuration files."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from espalier.engine.errors import InvalidRequestError, nearest_of_each
from espalier.experiments.cli.options import OptionError
from espalier.experiments.runs.grid import read_values, read_values_of
from espalier.search.request import SearchRequest
from espalier.search.run.settings import RuntimeSettings, check_settings
from espalier.search.schema import CONFIG_SUFFIXES, CodeName, Field, declared, violations

_with_options: dict[type, None] = {}
"""Declared dataclasses whose fields are options of any command."""


@dataclass(frozen=True)
class Lists:
    """Annotation of a parameter that receives lists of values for the fields of a search.

    Attributes:
        defaults: of the command, to show in the help instead of the fields' own, by field.
        also: further flags, by field.
    """

    defaults: Mapping[str, list[Any]]
    also: Mapping[str, str] = field(default_factory=dict)


class Without(tuple[str, ...]):
    """Annotation of a parameter of a declared dataclass: fields that have no effect in the command, and no option."""

    def __new__(cls, *fields: str) -> Self:
        """Create it from the fields' names."""
        return super().__new__(cls, fields)


class Only(Without):
    """Annotation of a parameter of a declared dataclass: the only fields that have an option."""


def _annotated(annotation: Any, kind: type[Any]) -> Any:
    """The object of this kind in an annotation; None without it."""
    return next((item for item in getattr(annotation, "__metadata__", ()) if isinstance(item, kind)), None)


def _has_option(annotation: Any, field: str) -> bool:
    named = _annotated(annotation, Without) or Without()
    return (field in named) == isinstance(named, Only)


def with_schema(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameters that are declared dataclasses by one option for each of their fields.

    A dataclass is declared (see `search.schema`) if it has a `help_panel`; with an `env_prefix`, its fields can also be
    set by environment variables. A field with the same name as a parameter of the command gets no option: it keeps its
    default, or `-` without one; so do those that an annotation `Without` names, or `Only` does not. A parameter
    annotated with `Lists` gets options with lists of values instead, and receives the given ones by field. `--config`
    reads options from a file; the command line and the environment override it.
    """
    own = inspect.signature(command)
    annotations = {p.name: p.annotation for p in own.parameters.values()}
    lists: dict[str, Lists] = {name: its for name, each in annotations.items() if (its := _annotated(each, Lists))}
    kinds: dict[str, Any] = {
        name: getattr(each, "__origin__", each) for name, each in annotations.items() if hasattr(each, "help_panel")
    } | dict.fromkeys(lists, SearchRequest)
    _with_options.update(dict.fromkeys(kinds.values()))
    options = {
        name: [
            field
            for field in declared(kind)
            if field.option and field.name not in annotations and _has_option(annotations[name], field.name)
        ]
        for name, kind in kinds.items()
    }

    @functools.wraps(command)
    def run(config: Path | None, **given: Any) -> None:
        for name, kind in kinds.items():
            if name in lists:
                values = {field: given.pop(field.name) for field in options[name]}
                given[name] = {field.name: value for field, value in values.items() if value is not None}
                continue
            empty = {field.name: "-" for field in declared(kind) if field.default is MISSING}
            made = kind(**empty, **{field.name: given.pop(field.name) for field in options[name]})
            if isinstance(made, RuntimeSettings):
                check_settings(made)
            elif kind is not SearchRequest and (wrong := violations(made)):  # requests are validated when submitted
                raise InvalidRequestError(wrong)
            given[name] = made
        command(**given)

    kept = [p for p in own.parameters.values() if p.name not in kinds]
    added = [_parameter(field, kinds[name], lists.get(name)) for name, its in options.items() for field in its]
    run.__signature__ = own.replace(parameters=[*kept, *added, _CONFIG])  # pyright: ignore[reportAttributeAccessIssue] - Typer reads it
    return run


def flag_of(name: str) -> str:
    """The flag of a declared field in some command, such as `-N/--beam-width`; the name itself if it has none."""
    found = (field for kind in _with_options for field in declared(kind))
    flags = {f.name: f"{f.option.short}/{f.flag}" if f.option.short else f.flag for f in found if f.option}
    return flags.get(name, name)


def _parameter(field: Field, kind: Any, lists: Lists | None) -> inspect.Parameter:
    """The option of a field; with `lists`, it takes a list of values, and is None if it is not given."""
    assert field.option is not None
    annotation, default = field.kind | None if field.optional else field.kind, field.default
    flags, parse = [field.flag, field.option.short], field.option.parse
    text, panel, prefix = field.option.help, kind.help_panel, getattr(kind, "env_prefix", None)
    given: dict[str, Any] = {}
    if field.range and (lists or not parse):
        text = f"{text} ({field.range})"
    if lists:
        shown = lists.defaults.get(field.name, [] if default in (None, MISSING) else [default])
        annotation, default, prefix = str | None, None, None
        flags.append(lists.also.get(field.name, ""))
        panel = f"{panel}: values, or lists of them like 1,2,4"
        given = {"parser": _parser(partial(read_values, field)), "metavar": "LIST"}
        given["show_default"] = ",".join(map(str, shown)) or False
    elif field.own:
        given = _choice_or_code(field.kind)
    elif parse:
        given = {
            "parser": _parser(lambda given: parse(given) if isinstance(given, str) else given),
            "metavar": "TEXT" if field.kind is str else "SIZE",
        }
        if default is not None:
            given["show_default"] = field.show(default)
    elif field.kind is bool and default:
        flags[0] = f"{field.flag}/--no-{field.flag.removeprefix('--')}"
    option = typer.Option(
        *filter(None, flags),
        help=text,
        envvar=f"{prefix}{field.name.upper()}" if prefix else None,
        rich_help_panel=panel,
        **given,
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, option]
    )


def _choice_or_code(kind: Any) -> dict[str, Any]:
    """An option's settings that take one of an enum's values, or MODULE:CLASS."""
    names = list(map(str, kind))

    def read(given: str) -> Any:
        if ":" in given:
            return CodeName(given)
        if given not in names:
            raise ValueError(f"{given!r} is not one of {', '.join(map(repr, names))}, and not MODULE:CLASS of yours.")
        return kind(given)

    return {
        "parser": _parser(read),
        "metavar": f"<{'|'.join(names)}|MODULE:CLASS or MODULE:CLASS:NAME=VALUE of yours>",
        "autocompletion": lambda incomplete: [name for name in names if name.startswith(incomplete)],
    }


def _parser(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def parser(given: Any) -> Any:
        try:
            return read(given)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parser


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Use the values of a configuration file as defaults of the command's options."""
    if path is None or context.resilient_parsing:
        return path
    values = read_values_of("--config", path)
    if not isinstance(values, dict):
        raise OptionError(f"--config: {str(path)!r} must hold options by name, like `beam_width: 4`")
    options = [parameter for parameter in context.command.params if parameter.name not in ("config", "help")]
    named: dict[str, Any] = {}
    unknown: list[str] = []
    for name, where, value in _entries(values):
        known = {option.name for option in options if where in ("", _section(option))}
        if name not in known:
            unknown.append(f"{where}.{name}" if where else name)
        elif name in named:
            raise OptionError(f"--config: {str(path)!r} gives {name} twice")
        named[name] = value
    if unknown:
        raise OptionError(
            f"--config: {str(path)!r} has keys that are no options of `{context.info_name}`: "
            + nearest_of_each(unknown, [str(option.name) for option in options])
        )
    context.default_map = {**(context.default_map or {}), **named}
    return path


def _entries(values: dict[Any, Any]) -> Iterator[tuple[str, str, Any]]:
    """The entries of a configuration file: option, table or "" for none, and value."""
    for name, value in values.items():
        name = str(name).replace("-", "_")
        if isinstance(value, dict):
            yield from ((str(inner).replace("-", "_"), name.lower(), own) for inner, own in value.items())
        else:
            yield name, "", value


def _section(option: Any) -> str:
    """The table of a configuration file that may hold an option: the first word of its panel of the help."""
    return (getattr(option, "rich_help_panel", None) or "").partition(":")[0].lower().replace(" ", "_")


_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            "--config",
            is_eager=True,
            callback=_read_config,
            help=f"Read options from a file ({', '.join(CONFIG_SUFFIXES)}), by name or in tables named like the groups "
            "of this help; flags and the environment override it.",
        ),
    ],
)
