"""Declares the fields of requests and settings once: type, default, range, help text and flag of each.

    beam_width: int = option(4, "Paths kept after each step.", Interval(ge=1, le=256), short="-N")

A field without a flag may have a range, `Annotated[int, Interval(ge=1)]`, and one whose text is in a small language is
made by `parsed`. A `Field` as an annotation is one that is declared elsewhere.

From the declarations follow validation (`violations`, `from_values`), the command line with its environment variables
and configuration files (`experiments.cli.schema_options`), and protobuf conversion
(`search.service.grpc_api.convert`) for fields of the same name in the `.proto`. A field may also list instances of
another declared dataclass, `tuple[ChatMessage, ...]`; it has no flag.
"""

import json
import re
import reprlib
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from dataclasses import Field as DataclassField
from dataclasses import field as dataclass_field
from enum import StrEnum
from functools import cache, cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Self, TypeVar, cast, get_args, get_origin, get_type_hints

from annotated_types import Interval

from espalier.engine.errors import InvalidRequestError, Violation, nearest

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")

KINDS: Mapping[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
"""Types of values, and what errors call them."""
CONFIG_SUFFIXES = (".json", ".toml", ".yaml", ".yml")
"""Formats of files with values of fields."""
_SURROGATES = re.compile("[\ud800-\udfff]")
_NO_UNICODE = "must be valid Unicode, has an unpaired surrogate"
"""JSON can say what no UTF-8 can; such a text would fail wherever it is encoded, on the engine's thread too."""
MAX_ITEMS = 1024
"""Longest list whose items are looked at."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_FEW = 16
"""Unknown names that one error lists."""
_NAME = 80
"""Longest part of a name from outside that an error shows."""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class CodeName(str):
    """The name of code to load, `MODULE:NAME`, from an option or an argument in Python.

    Only for these is code loaded. What comes over the wire is plain text and stays so.
    """

    __slots__ = ()


class Parsed(str, Generic[T]):
    """A text in a small language, such as `tokens:64`, and the `value` that was read from it; None for an empty text.

    A request's fields hold it in place of their text, so that it is read once. Files, JSON and the wire have the text.
    """

    value: T

    def __new__(cls, text: str, value: T) -> Self:
        """Create the text with its value."""
        self = super().__new__(cls, text)
        self.value = value
        return self

    def __reduce__(self) -> Any:
        return Parsed, (str(self), self.value)

    def __deepcopy__(self, memo: Any) -> str:
        return str(self)  # `asdict` gives what files have


@dataclass(frozen=True, slots=True)
class Option:
    """The command-line side of a field.

    Attributes:
        help: text for `--help`.
        short: one-letter flag, like `-N`; None for none.
        parse: converts text, or a mapping to text, to the value and raises ValueError with the reason; None uses the
            field's type.
        has_commas: whether its text may have commas, so that a list of values is not one text.
    """

    help: str
    short: str = ""
    parse: Callable[[Any], Any] | None = None
    has_commas: bool = False


def option(default: T, help: str, bounds: Interval | None = None, **of_flag: Any) -> T:
    """A field with a default, a flag and, for a number, a range; `of_flag` are fields of `Option`.

    It is the default of a field of a dataclass, or of a command's parameter; see `cli.schema_options`.
    """
    return dataclass_field(default=default, metadata={"declared": (Option(help, **of_flag), bounds)})


def optional(help: str, bounds: Interval | None = None, **of_flag: Any) -> None:
    """See `option`: a field that is None by default."""
    return option(None, help, bounds, **of_flag)


def parsed(read: Callable[[str], T], default: str = "", help: str = "", empty: Any = None, **of_flag: Any) -> Parsed[T]:
    """A field whose text is read once; with a flag if it has a `help`.

    Args:
        read: reads the text; raises ValueError with the reason.
        default: its default text.
        help: for `--help`.
        empty: the value of an empty default.
        **of_flag: fields of `Option`.
    """
    declares = (Option(help, **of_flag),) if help else ()
    value = read(default) if default else empty
    return dataclass_field(default=Parsed(default, value), metadata={"declared": declares, "reads": read})


@dataclass(frozen=True)
class Field:
    """One declared field.

    Attributes:
        name: name of the attribute, of the flag (with dashes) and of the protobuf field.
        kind: its type, without None.
        optional: whether None is allowed.
        default: its default, MISSING without one.
        bounds: range of a number; None for any.
        option: None for a field without a flag.
        own: whether a `CodeName` stands for a value, too; text never does.
        reads: reads its text; None for plain text and anything else.
    """

    name: str
    kind: type
    optional: bool
    default: Any
    bounds: Interval | None
    option: Option | None
    own: bool = False
    reads: Callable[[str], Any] | None = None

    @property
    def flag(self) -> str:
        """The long flag."""
        return "--" + self.name.replace("_", "-")

    @cached_property
    def item(self) -> type | None:
        """The dataclass whose instances the field lists; None for a single value."""
        items = get_args(self.kind)
        lists = get_origin(self.kind) is tuple and isinstance(items[0], type) and is_dataclass(items[0])
        return items[0] if lists else None

    @cached_property
    def _adapter(self) -> "TypeAdapter[Any]":
        from pydantic import ConfigDict, TypeAdapter  # slow to import: 0.1 s

        rule: Any = self.kind if self.bounds is None else Annotated[self.kind, self.bounds]
        return TypeAdapter(rule, config=ConfigDict(strict=True, allow_inf_nan=False))

    @property
    def range(self) -> str:
        """The range as text, like `between 1 and 256`; empty without bounds."""
        if self.bounds is None:
            return ""
        low, above, high, below = self.bounds.ge, self.bounds.gt, self.bounds.le, self.bounds.lt
        if low is not None and high is not None:
            return f"between {self.show(low)} and {self.show(high)}"
        ends = {"above": above, "at least": low, "at most": high, "below": below}
        return " and ".join(f"{words} {self.show(end)}" for words, end in ends.items() if end is not None)

    def show(self, value: Any) -> str:
        """Format a value for messages: sizes with their unit, 2**63 - 1 as a power."""
        if not isinstance(value, int | float):
            return _SHORT.repr(value)
        if isinstance(value, int) and self.option and self.option.parse is parse_size:
            return size_text(value)
        if isinstance(value, int) and value >= 2**31 - 1 and (value + 1).bit_count() == 1:
            return f"2**{(value + 1).bit_length() - 1} - 1"
        return str(value)

    def violation(self, value: Any) -> str | None:
        """Return what is wrong with a value, None if it is valid."""
        if (value is None and self.optional) or (self.own and isinstance(value, CodeName)):
            return None
        if self.item:
            return _list_violation(self.item, value)
        if isinstance(value, str) and _SURROGATES.search(value):
            return _NO_UNICODE
        try:
            self._adapter.validate_python(value)
        except ValueError as error:
            rule, hint = self.range, ""
            if issubclass(self.kind, StrEnum):
                rule, hint = f"one of {', '.join(self.kind)}", nearest(value, self.kind)
            elif not rule or "type" in cast("ValidationError", error).errors()[0]["type"]:
                rule = KINDS.get(self.kind, "a path")
            return f"must be {rule}, is {self.show(value)}{hint}"
        has_been_read = isinstance(value, Parsed) or value == self.default
        if self.reads and isinstance(value, str) and not has_been_read:
            try:
                self.reads(value)
            except ValueError as error:
                return str(error)
        return None


@cache
def declared(kind: type) -> tuple[Field, ...]:
    """Return the fields of a declared dataclass, in order."""
    hints = get_type_hints(kind, include_extras=True)
    ordered = sorted(fields(kind), key=lambda f: f.kw_only is True)  # those of a base that has few come last
    return tuple(read_declaration(f.name, f, hints[f.name]) for f in ordered)


def violations(value: object, without: Collection[str] = ()) -> list[Violation]:
    """Validate an instance of a declared dataclass, `without` some fields; returns the violations in field order."""
    checked = (field for field in declared(type(value)) if field.name not in without)
    found = ((field.name, field.violation(getattr(value, field.name))) for field in checked)
    return [Violation(name, wrong) for name, wrong in found if wrong]


def read_texts(request: object) -> None:
    """Read the texts of a new request's `Parsed` fields; unreadable ones stay, and are among the `violations`."""
    for field in declared(type(request)):
        if field.reads and type(text := getattr(request, field.name)) is str and (text or not field.default):
            with suppress(ValueError):
                read = Parsed(text, field.reads(text)) if text else field.default
                object.__setattr__(request, field.name, read)


def text_violations(name: str, text: str, max_bytes: int) -> list[Violation]:
    """Validate a text: it must be valid Unicode of at most `max_bytes` bytes of UTF-8."""
    found: list[Violation] = []
    if _SURROGATES.search(text):
        found.append(Violation(name, _NO_UNICODE))
    if (size := len(text.encode(errors="replace"))) > max_bytes:
        found.append(Violation(name, f"must be at most {max_bytes} bytes, is {size}"))
    return found


def from_values(kind: type[T], values: Mapping[str, Any]) -> T:
    """Create an instance from plain values, as JSON, YAML and TOML have them.

    Raises:
        InvalidRequestError: lists unknown and missing names, and invalid values.
    """
    known = {field.name: field for field in declared(kind)}
    wrong = unknown_names([name for name in values if name not in known], known)
    wrong += [Violation(f.name, "is missing") for f in known.values() if f.default is MISSING and f.name not in values]
    typed: dict[str, Any] = {}
    for name, value in values.items():
        if (field := known.get(name)) is None:
            continue
        if isinstance(value, int) and field.option and not field.item and issubclass(field.kind, str):
            value = ("off", "on")[value] if isinstance(value, bool) else str(value)  # on and off are booleans in YAML
        stands_for_text = isinstance(value, Mapping) and field.kind is str
        if field.item:
            value = _items(field.item, name, value, wrong)
        elif value is not None and issubclass(field.kind, StrEnum) and value in list(field.kind):
            value = field.kind(value)
        elif field.option and field.option.parse and (isinstance(value, str) or stands_for_text):
            try:
                value = field.option.parse(value)
            except ValueError as error:
                wrong.append(Violation(name, str(error)))
                continue
        typed[name] = value
        if text := field.violation(value):
            wrong.append(Violation(name, text))
    if wrong:
        raise InvalidRequestError(wrong)
    return kind(**typed)


def mapping_text(mapping: Mapping[Any, Any]) -> str:
    """A mapping as fields of text have it: `13:-100,50256:2.5`."""
    return ",".join(f"{name}:{value}" for name, value in mapping.items())


def few(violations: Sequence[Violation]) -> list[Violation]:
    """The first violations of many of one kind, the last of them with the number of those that are left out."""
    shown, more = list(violations[:_FEW]), len(violations) - _FEW
    if more > 0:
        shown[-1] = replace(shown[-1], description=f"{shown[-1].description}; and {more} more like it")
    return shown


def unknown_names(
    names: Sequence[str], known: Collection[str], what: str = "is unknown", place: str = ""
) -> list[Violation]:
    """Violations of names that are none of `known`, with what looks most like each; `place` stands before them."""
    hints = [nearest(name, known) for name in names[:_FEW]]
    return few([
        Violation(f"{place}{name[:_NAME]}", what + hint) for name, hint in zip_longest(names, hints, fillvalue="")
    ])  # fmt: skip


def _items(kind: type, name: str, values: Any, wrong: list[Violation]) -> Any:
    """A list's items as instances of `kind`; what is wrong with them goes to `wrong`."""
    if not isinstance(values, list | tuple):
        return values
    if len(values) > MAX_ITEMS:
        wrong.append(Violation(name, f"must be at most {MAX_ITEMS} items, is {len(values)}"))
        return ()
    items = []
    for index, value in enumerate(values):
        try:
            items.append(from_values(kind, value) if isinstance(value, Mapping) else value)
        except InvalidRequestError as error:
            wrong += [Violation(f"{name}[{index}].{each.field}", each.description) for each in error.violations]
    return tuple(items)


def read_file_values(path: Path) -> Any:
    """Read a JSON, TOML or YAML file, by its suffix.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not of that format.
    """
    text = path.read_text(encoding="utf-8")
    match path.suffix.lower():
        case ".json":
            return json.loads(text)
        case ".toml":
            return tomllib.loads(text)
        case _:
            import yaml

            try:
                return yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(error) from error


def parse_size(text: str) -> int:
    """Parse a size such as `512M`, `1.5GiB` or `2GB`, in bytes; units are powers of 1024.

    Raises:
        ValueError: the text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a size; write 512M or 4G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def size_text(count: int) -> str:
    """Format bytes as `parse_size` reads them, in the largest unit that divides them."""
    unit = next(unit for unit in ("T", "G", "M", "K", "") if count and count % _UNITS[unit] == 0) if count else ""
    return f"{count // _UNITS[unit]}{unit}"


def _list_violation(kind: type, values: Any) -> str | None:
    """Return what is wrong with a list of instances of `kind`; its values are not shown, as they may be long."""
    if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values):
        return f"must be a list of objects with {' and '.join(field.name for field in declared(kind))}"
    found = (f"item {i}: {wrong.field} {wrong.description}" for i, v in enumerate(values) for wrong in violations(v))
    return next(found, None)


def read_declaration(name: str, of: DataclassField[Any], annotation: Any) -> Field:
    """The field that a dataclass or a command declares, by its annotation and what `option` returned."""
    kind, *metadata = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    kind = str if get_origin(kind) is Parsed else kind
    if metadata and isinstance(metadata[0], Field):
        return metadata[0]
    options = get_args(kind)
    of_type = {type(item): item for item in (*metadata, *of.metadata.get("declared", ()))}
    optional, own = type(None) in options, CodeName in options
    (kind,) = [k for k in options if k not in (type(None), CodeName)] if optional or own else [kind]
    if of_type.get(Option) and not (
        kind in KINDS or kind is Path or (isinstance(kind, type) and issubclass(kind, StrEnum))
    ):
        raise TypeError(f"{name} is {kind}; an option is {', '.join(k.__name__ for k in KINDS)}, a Path or a StrEnum")
    declares = of_type.get(Interval), of_type.get(Option), own, of.metadata.get("reads")
    return Field(name, kind, optional, of.default, *declares)
