"""Requests and settings, declared once: their rules, and plain values read by them."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, get_type_hints
from unittest.mock import ANY

import pytest
from annotated_types import Interval

from espalier.engine.errors import InvalidRequestError
from espalier.search.algorithms.base import SearchAlgorithm
from espalier.search.client import AsyncSearchClient
from espalier.search.client.async_client import ManyArguments
from espalier.search.request import AlgorithmName, SearchFields, SearchRequest
from espalier.search.run.settings import RuntimeSettings, SolverSettings
from espalier.search.schema import Field, Option, declared, from_values, parse_size, size_text, violations
from espalier.search.service.settings import ServerSettings
from espalier.search.solver import Solver


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Settings:
    help_panel: ClassVar = "Test"
    env_prefix: ClassVar = "TEST_"

    count: Annotated[int, Interval(ge=1, le=9), Option("How many.", short="-c")] = 3
    share: Annotated[float | None, Interval(gt=0, le=1), Option("How much.")] = None
    colour: Annotated[Colour, Option("Which.")] = Colour.RED
    loud: Annotated[bool, Option("Loud [or not].")] = True
    memory: Annotated[int, Interval(ge=1024), Option("Memory.", parse=parse_size)] = 2**20
    inner: int = 0


def wrong(**values: object) -> list[tuple[str, str]]:
    return [(v.field, v.description) for v in violations(Settings(**values))]  # pyright: ignore[reportArgumentType]


# --- rules ---------------------------------------------------------------------------------------------------------


def test_values_at_their_bounds_break_no_rule():
    assert wrong(count=1, share=1.0, memory=1024) == wrong(count=9, share=1e-9) == wrong(share=1) == []


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("count", 0, "must be between 1 and 9, is 0"),
        ("count", 10, "must be between 1 and 9, is 10"),
        ("count", "3", "must be a whole number, is '3'"),
        ("count", 1.5, "must be a whole number, is 1.5"),
        ("count", True, "must be a whole number, is True"),
        ("count", None, "must be a whole number, is None"),
        ("share", 0, "must be above 0 and at most 1, is 0"),
        ("share", float("nan"), "must be above 0 and at most 1, is nan"),
        ("colour", "green", "must be one of red, blue, is 'green'"),
        ("loud", 1, "must be true or false, is 1"),
        ("memory", 1023, "must be at least 1K, is 1023"),
    ],
)
def test_a_broken_rule_is_said_with_the_value(field, value, rule):
    assert wrong(**{field: value}) == [(field, rule)]


def test_all_broken_rules_are_listed_in_order_of_the_fields():
    assert [field for field, _ in wrong(memory=0, count=0, share=2.0)] == ["count", "share", "memory"]


def test_a_large_bound_is_written_as_a_power():
    (seed,) = [field for field in declared(SearchRequest) if field.name == "seed"]
    assert seed.range == "between 0 and 2**63 - 1"


def test_plain_values_as_a_file_has_them_become_the_dataclass():
    values = json.loads('{"count": 2, "share": null, "colour": "blue", "memory": "2M"}')
    assert from_values(Settings, values) == Settings(2, None, Colour.BLUE, memory=2**21)


def test_unknown_names_and_wrong_values_of_a_file_are_listed_together():
    with pytest.raises(InvalidRequestError) as caught:
        from_values(Settings, {"cuont": 1, "count": 0, "memory": "lots"})
    assert {v.field for v in caught.value.violations} == {"cuont", "count", "memory"}


@pytest.mark.parametrize("kind", [SearchRequest, RuntimeSettings, ServerSettings])
def test_the_defaults_break_no_rule(kind):
    assert violations(kind(**({"problem": "1+1?"} if kind is SearchRequest else {}))) == []


def test_a_field_may_list_what_is_declared_elsewhere():
    @dataclass(frozen=True)
    class Palette:
        settings: tuple[Settings, ...] = ()

    values = json.loads('{"settings": [{"count": 2, "colour": "blue"}, {}]}')
    assert from_values(Palette, values) == Palette((Settings(2, colour=Colour.BLUE), Settings()))
    with pytest.raises(InvalidRequestError) as caught:
        from_values(Palette, {"settings": [{"count": 0}, {"cuont": 1}]})
    assert [v.field for v in caught.value.violations] == ["settings[0].count", "settings[1].cuont"]
    for wrong in ("red", 3, None, {}, [3], [[]]):
        with pytest.raises(InvalidRequestError, match="settings: must be a list of objects with count and share"):
            from_values(Palette, {"settings": wrong})
    assert [v.description for v in violations(Palette((Settings(), Settings(count=0))))] == [
        "item 1: count must be between 1 and 9, is 0"
    ]


@pytest.mark.parametrize(("value", "text"), [(120, "120"), (False, "off"), (True, "on"), ("auto", "auto")])
def test_texts_of_a_file_may_look_like_numbers_and_switches(value: object, text: str):
    assert from_values(SearchRequest, {"problem": "1+1", "thinking": value}).thinking == text
    with pytest.raises(InvalidRequestError, match="problem: must be text, is 120"):
        from_values(SearchRequest, {"problem": 120, "thinking": value})


def test_a_field_without_a_default_must_be_given():
    with pytest.raises(InvalidRequestError, match="problem: is missing"):
        from_values(SearchRequest, {"seed": 3})


def test_a_kind_of_option_that_no_command_line_could_read_is_refused_at_once():
    @dataclass(frozen=True)
    class Listed:
        words: Annotated[tuple[str, ...], Option("Some words.")] = ()

    with pytest.raises(TypeError, match=r"words is .*; an option is int, float, bool, str, a Path or a StrEnum"):
        declared(Listed)


# --- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("512", 512),
        ("1K", 1024),
        ("512M", 512 * 2**20),
        ("4G", 4 * 2**30),
        ("1T", 2**40),
        ("1.5GiB", 3 * 2**29),
        ("2GB", 2**31),
        ("2gb", 2**31),
        ("10 MiB", 10 * 2**20),
        (" 7k ", 7 * 1024),
    ],
)
def test_sizes_are_in_powers_of_1024(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "lots", "G", "-1G", "1P", "1,5G", "0x10", "1e9", "4 G B", "1GG", "nan", "inf"])
def test_anything_else_is_not_a_size_and_the_error_shows_how_to_write_one(text):
    with pytest.raises(ValueError, match=r"write 512M or 4G") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 1000, 1024, 1536, 2**20, 3 * 2**29, 2**40])
def test_a_size_is_written_as_it_is_read(size):
    assert parse_size(size_text(size)) == size


# --- typed keyword arguments ---------------------------------------------------------------------------------------


def arguments_of(kind: type) -> dict[str, Any]:
    """The types with which a declared dataclass's fields can be given by name."""
    return {field.name: _argument(field) for field in declared(kind) if field.default is not MISSING}


def _argument(field: Field) -> Any:
    if field.item:
        return Sequence[field.item | Mapping[str, str]]
    of_text = issubclass(field.kind, StrEnum) or (field.option and field.option.parse)
    given = field.kind | str if of_text else field.kind
    return given | None if field.optional else given


def test_keyword_arguments_of_searches_are_the_fields_of_requests():
    own: dict[str, Any] = {"algorithm": AlgorithmName | str | type[SearchAlgorithm] | None}  # a class of the user's
    own["logit_bias"] = str | Mapping[int, float]
    own["tools"] = str | Sequence[Mapping[str, Any] | Callable[..., Any]]
    assert get_type_hints(SearchFields) == arguments_of(SearchRequest) | own


def test_keyword_arguments_of_the_solver_are_the_fields_of_its_settings():
    named = inspect.signature(Solver.__init__).parameters
    assert get_type_hints(SolverSettings) | dict.fromkeys(named, ANY) == {
        **dict.fromkeys(named, ANY),
        **{name: hint for name, hint in arguments_of(RuntimeSettings).items() if name not in named},
    }


def test_keyword_arguments_of_many_searches_are_those_of_the_method():
    parameters = dict(inspect.signature(AsyncSearchClient.solve_many).parameters)
    named = {name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY} - {"return_errors"}
    assert get_type_hints(ManyArguments).keys() == get_type_hints(SearchFields).keys() | named
