"""The grid of a sweep: lists of values for the fields of a search, and the distinct searches of their product."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any

from espalier.engine.errors import EspalierError, InvalidRequestError, nearest_of_each
from espalier.search.algorithms import unused_fields
from espalier.search.request import SearchRequest
from espalier.search.schema import CONFIG_SUFFIXES, CodeName, Field, declared, from_values, read_file_values

N_AND_M = ("beam_width", "expansion")
FIELDS: Mapping[str, Field] = {field.name: field for field in declared(SearchRequest) if field.option}
"""Fields that a sweep can vary, by name."""
_RANGE = re.compile(r"\s*(\d+):(\d+)\s*")
_UNSAFE = re.compile(r"[^\w.:=+-]")
"""Characters of a value that do not go into the name of a folder."""
_MAX_CELLS = 4096
_SHORT = {"beam_width": "N", "expansion": "M", "algorithm": ""}


def read_values(field: Field, given: Any) -> list[Any]:
    """Read the values of one field: text like `1,2,4` or, of whole numbers, `0:3` for 0, 1, 2; or a list; or one value.

    Text of a field whose values have commas is one value.

    Ranges of values are checked by `requests_of`, which sees all fields.

    Raises:
        ValueError: a value is not of the field's kind, or is listed twice.
    """
    splits = isinstance(given, str) and not (field.option and field.option.has_commas)
    parts = given.split(",") if splits else given if isinstance(given, list) else [given]
    values: list[Any] = []
    for part in parts:
        match = _RANGE.fullmatch(part) if isinstance(part, str) and field.kind is int else None
        if match:
            numbers = range(int(match[1]), int(match[2]))
            if not 0 < len(numbers) <= _MAX_CELLS:
                raise ValueError(f"{part.strip()!r} must hold between 1 and {_MAX_CELLS} numbers; 0:3 is 0, 1, 2")
            values += numbers
        else:
            values.append(_value(field, part))
    if not values:
        raise ValueError("must hold at least one value")
    if twice := [value for i, value in enumerate(values) if value in values[:i]]:
        raise ValueError(f"lists {field.show(twice[0])} twice; write each value once")
    return values


def _value(field: Field, part: Any) -> Any:
    if isinstance(part, str):
        part = part.strip()
        if field.own and ":" in part:
            return CodeName(part)
        if field.kind not in (int, float):
            return part
        try:
            return field.kind(part)
        except ValueError:
            example = "0:3 or 1,2,4" if field.kind is int else "0.6,1.0"
            raise ValueError(f"{part!r} is not a number; write a list like {example}") from None
    is_whole = isinstance(part, int) and not isinstance(part, bool)
    return float(part) if field.kind is float and is_whole else part


def read_grid(path: Path) -> list[dict[str, list[Any]]]:
    """Read a grid from a YAML, TOML or JSON file: a mapping of fields to lists, or a list of such mappings.

    Each mapping stands for the product of its lists. As TOML has no list at the top, its tables `[[cells]]` are one.

    Raises:
        EspalierError: the file cannot be read, or has another shape, unknown fields or values of another kind.
    """
    found = read_values_of("--grid", path)
    if isinstance(found, dict) and list(found) == ["cells"]:
        found = found["cells"]
    entries = found if isinstance(found, list) else [found]
    if not entries or not all(isinstance(entry, dict) and entry for entry in entries):
        raise EspalierError(f"--grid: {str(path)!r} must hold fields with lists of values, or a list of such mappings")
    return [_entry(path, entry) for entry in entries]


def read_values_of(flag: str, path: Path) -> Any:
    """Read the YAML, TOML or JSON file that an option names.

    Raises:
        EspalierError: it has another suffix, or cannot be read.
    """
    if path.suffix.lower() not in CONFIG_SUFFIXES:
        raise EspalierError(f"{flag}: {str(path)!r} must end in {', '.join(CONFIG_SUFFIXES)}")
    try:
        return read_file_values(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise EspalierError(f"{flag}: cannot read {str(path)!r}: {why}") from None


def _entry(path: Path, entry: Mapping[Any, Any]) -> dict[str, list[Any]]:
    named = {str(name).replace("-", "_"): given for name, given in entry.items()}
    if unknown := sorted(named.keys() - FIELDS.keys()):
        own = ":" in str(named.get("algorithm", ""))
        hint = "; parameters of a class of yours follow its name, MODULE:CLASS:NAME=VALUE" if own else ""
        said = f"{nearest_of_each(unknown, FIELDS)}{hint}"
        raise EspalierError(f"--grid: {str(path)!r} has keys that are no fields of a search: {said}")
    read: dict[str, list[Any]] = {}
    for name, given in named.items():
        try:
            read[name] = read_values(FIELDS[name], given)
        except (ValueError, TypeError) as error:
            raise EspalierError(f"--grid: {str(path)!r}: {name} ({FIELDS[name].flag}): {error}") from None
    return read


def requests_of(options: Mapping[str, list[Any]], grid: Sequence[Mapping[str, list[Any]]] = ()) -> list[SearchRequest]:
    """Return the searches of all cells: each mapping of `grid` times `options`.

    Raises:
        InvalidRequestError: lists what is wrong with any cell, by field.
        EspalierError: a field is in both, or there are too many cells.
    """
    requests: list[SearchRequest] = []
    wrong: dict[Any, None] = {}
    for entry in grid or [{}]:
        if both := sorted(entry.keys() & options.keys()):
            flags = ", ".join(FIELDS[name].flag for name in both)
            raise EspalierError(f"{flags}: also in --grid; give the values in one of them")
        lists = {**entry, **options}
        cells = len(requests) + prod(len(values) for values in lists.values())
        if cells > _MAX_CELLS:
            raise EspalierError(f"a sweep has at most {_MAX_CELLS} cells, these lists give {cells}")
        for point in product(*lists.values()):
            try:
                request = from_values(SearchRequest, {"problem": "-", **dict(zip(lists, point, strict=True))})
                request.validate()
                requests.append(request)
            except InvalidRequestError as error:
                wrong |= dict.fromkeys(error.violations)
    if wrong:
        raise InvalidRequestError(list(wrong))
    return requests


def settings_of(effective: SearchRequest) -> dict[str, Any]:
    """Values of all fields that the search uses; None for those that it does not use."""
    unused = unused_fields(effective)
    return {name: None if name in unused else getattr(effective, name) for name in FIELDS}


def key_of(effective: SearchRequest) -> tuple[Any, ...]:
    """Equal for searches that differ only in fields that they do not use."""
    return tuple(settings_of(effective).values())


def distinct(
    requests: Iterable[SearchRequest], effective: Callable[[SearchRequest], SearchRequest]
) -> list[SearchRequest]:
    """Return the first of each group of searches that are equal after defaults are filled in by `effective`."""
    first: dict[tuple[Any, ...], SearchRequest] = {}
    for request in requests:
        first.setdefault(key_of(effective(request)), request)
    return list(first.values())


def varied_fields(effective: Iterable[SearchRequest]) -> list[str]:
    """Fields other than N and M in which searches that use them differ, in the request's order.

    A limit that one algorithm has by default and another has not is no difference.
    """
    values: dict[str, list[tuple[object, Any]]] = {name: [] for name in FIELDS if name not in N_AND_M}
    for request in effective:
        unused = unused_fields(request)
        for name, its in values.items():
            if name not in unused and (found := (request.algorithm, getattr(request, name))) not in its:
                its.append(found)
    return [name for name, its in values.items() if any(_differ(*pair) for pair in combinations(its, 2))]


def _differ(one: tuple[object, Any], other: tuple[object, Any]) -> bool:
    """True if two algorithms' values of a field differ, other than by a limit that one of the two has not."""
    (algorithm, value), (another, its) = one, other
    return value != its and (algorithm == another or None not in (value, its))


def cell_name(effective: SearchRequest, varied: Sequence[str]) -> str:
    """Name of a cell's run folder: `N4-M2` if only N and M vary, else like `beam-N4-M2-temperature0.6`."""
    if not varied:
        return f"N{effective.beam_width}-M{effective.expansion}"
    used = {name: value for name, value in settings_of(effective).items() if name not in unused_fields(effective)}
    parts = (_part(name, used[name]) for name in column_names(varied) if name in used)
    return "-".join(parts) or str(effective.algorithm)


def column_names(varied: Sequence[str]) -> list[str]:
    """The settings in a sweep's tables: the algorithm if it varies, N, M, and the other varied fields."""
    others = [name for name in varied if name not in ("algorithm", *N_AND_M)]
    return [*(["algorithm"] if "algorithm" in varied else []), *N_AND_M, *others]


def is_cell_name(name: str, effective: SearchRequest) -> bool:
    """Return true if `cell_name` could have named the run folder of a search `name`, whichever fields varied."""
    unused = unused_fields(effective)
    rest = name
    for field in column_names(list(FIELDS)):
        part = _part(field, getattr(effective, field))
        if rest == part or rest.startswith(f"{part}-"):
            rest = rest[len(part) + 1 :]
        elif field in N_AND_M and field not in unused:
            return False
    return not rest or rest.isdecimal()


def _part(name: str, value: Any) -> str:
    return f"{_SHORT.get(name, name.replace('_', '-'))}{'none' if value is None else _UNSAFE.sub('_', str(value))}"


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings of a cell for messages, like `beam N=4 M=2 temperature=0.6`, without unused fields."""
    used = {name: value for name, value in settings.items() if value is not None}
    return " ".join(
        str(value) if name == "algorithm" else f"{_SHORT.get(name, name)}={value}" for name, value in used.items()
    )
