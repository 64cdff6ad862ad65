"""Turns declared dataclasses into options of a command: flags, environment variables and configuration files."""

import functools
import inspect
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from dataclasses import Field as DataclassField
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from espalier.engine.errors import InvalidRequestError, Violation, nearest_of_each
from espalier.experiments.cli.options import OptionError
from espalier.experiments.runs.grid import read_values, read_values_of
from espalier.search.request import SearchRequest
from espalier.search.run.settings import RuntimeSettings, check_settings
from espalier.search.schema import CONFIG_SUFFIXES, CodeName, Field, declared, read_declaration, violations

_with_options: dict[type, None] = {}
"""Declared dataclasses whose fields are options of any command."""


@dataclass(frozen=True)
class Fields:
    """Annotation of a parameter of a declared dataclass: which of its fields have an option, and of what kind.

    Attributes:
        only: the only fields with an option; None for all.
        without: fields that have no effect in the command, and no option.
        defaults: of the command, in place of the fields' own.
        lists: whether options take lists of values for the fields of a search; the parameter receives the given ones.
        also: further flags, by field.
    """

    only: Collection[str] | None = None
    without: Collection[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    lists: bool = False
    also: Mapping[str, str] = field(default_factory=dict)

    def of(self, kind: type) -> list[Field]:
        """The fields of a dataclass that have an option."""
        chosen = [f for f in declared(kind) if f.option and f.name not in self.without]
        return [f for f in chosen if self.only is None or f.name in self.only]


@dataclass(frozen=True)
class Outcome:
    """The end of a command.

    Attributes:
        values: what it prints with `--json`.
        show: prints it for readers.
        code: exit code.
        errors: what goes to standard error, a line each.
    """

    values: Any
    show: Callable[[Console], None]
    code: int = 0
    errors: Sequence[str] = ()


def with_schema(command: Callable[..., Outcome | None]) -> Callable[..., None]:
    """Replace a command's parameters that are declared dataclasses by one option for each of their fields.

    A dataclass is declared (see `search.schema`) if it has a `help_panel`; with an `env_prefix`, its fields can also be
    set by environment variables. A field with the same name as a parameter of the command gets no option: it keeps its
    default, or `-` without one; so do those that an annotation `Fields` leaves out. `--config` reads options from a
    file; the command line and the environment override it. A command that returns an `Outcome` also has `--json`.
    Parameters whose default is an `option` are declared, too.
    """
    own = inspect.signature(command)
    annotations = {p.name: p.annotation for p in own.parameters.values()}
    its = {
        name: next((each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Fields)), Fields())
        for name, annotation in annotations.items()
    }
    kinds: dict[str, Any] = {
        name: SearchRequest if its[name].lists else getattr(annotation, "__origin__", annotation)
        for name, annotation in annotations.items()
        if its[name].lists or hasattr(annotation, "help_panel")
    }
    _with_options.update(dict.fromkeys(kinds.values()))
    options = {name: [f for f in its[name].of(kind) if f.name not in annotations] for name, kind in kinds.items()}

    declares = {p.name: p for p in own.parameters.values() if isinstance(p.default, DataclassField)}
    single = [read_declaration(name, p.default, p.annotation) for name, p in declares.items()]
    json_flag = [_AS_JSON] if own.return_annotation is Outcome else []

    @functools.wraps(command)
    def run(config: Path | None, **given: Any) -> None:
        as_json = given.pop("as_json") if json_flag else False
        if wrong := [Violation(field.flag, text) for field in single if (text := field.violation(given[field.name]))]:
            raise InvalidRequestError(wrong)
        for name, kind in kinds.items():
            values = {field.name: given.pop(field.name) for field in options[name]}
            if its[name].lists:
                given[name] = {field: value for field, value in values.items() if value is not None}
                continue
            empty = {field.name: "-" for field in declared(kind) if field.default is MISSING}
            given[name] = made = kind(**empty | values)
            if isinstance(made, RuntimeSettings):
                check_settings(made)
            elif kind is not SearchRequest and (wrong := violations(made)):  # requests are validated when submitted
                raise InvalidRequestError(wrong)
        if outcome := command(**given):
            if as_json:
                print(json.dumps(outcome.values, indent=2, default=str))
            else:
                outcome.show(Console(highlight=False, markup=False))
            for error in outcome.errors:
                print(f"error: {error}", file=sys.stderr)
            if outcome.code:
                raise typer.Exit(outcome.code)

    kept = [p for p in own.parameters.values() if p.name not in kinds.keys() | declares]
    added = [_parameter(field, None, Fields()) for field in single]
    added += [_parameter(field, kinds[name], its[name]) for name, chosen in options.items() for field in chosen]
    run.__signature__ = own.replace(parameters=[*kept, *json_flag, *added, _CONFIG])  # pyright: ignore[reportAttributeAccessIssue] - Typer reads it
    return run


def flag_of(name: str) -> str:
    """The flag of a declared field in some command, such as `-N/--beam-width`; the name itself if it has none."""
    found = (field for kind in _with_options for field in declared(kind))
    flags = {f.name: f"{f.option.short}/{f.flag}" if f.option.short else f.flag for f in found if f.option}
    return flags.get(name, name)


def _parameter(field: Field, kind: Any, its: Fields) -> inspect.Parameter:
    """The option of a field; one of lists is None if it is not given."""
    assert field.option is not None
    annotation = field.kind | None if field.optional else field.kind
    default = its.defaults.get(field.name, field.default)
    flags, parse = [field.flag, field.option.short], field.option.parse
    text, panel, prefix = field.option.help, getattr(kind, "help_panel", None), getattr(kind, "env_prefix", None)
    given: dict[str, Any] = {}
    if field.range and (its.lists or not parse):
        text = f"{text} ({field.range})"
    if its.lists:
        shown = default if isinstance(default, list) else [] if default in (None, MISSING) else [default]
        annotation, default, prefix = str | None, None, None
        flags.append(its.also.get(field.name, ""))
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
    return _keyword(field.name, annotation, option, default)


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
        said = nearest_of_each(unknown, [str(option.name) for option in options])
        raise OptionError(f"--config: {str(path)!r} has keys that are no options of `{context.info_name}`: {said}")
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


def _keyword(name: str, kind: Any, option: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


_AS_JSON = _keyword("as_json", bool, typer.Option("--json", help="Print it as JSON."), False)
_CONFIG = _keyword(
    "config",
    Path | None,
    typer.Option(
        "--config",
        is_eager=True,
        callback=_read_config,
        help=f"Read options from a file ({', '.join(CONFIG_SUFFIXES)}), by name or in tables named like the groups "
        "of this help; flags and the environment override it.",
    ),
    None,
)
