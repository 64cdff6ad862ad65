"""Options made of declared dataclasses, and a new field, which is seen everywhere."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar

import pytest
import typer
from annotated_types import Interval
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from typer.testing import CliRunner

from espalier.experiments.cli.help import CommandLine
from espalier.experiments.cli.options import OptionError
from espalier.experiments.cli.schema_options import with_schema
from espalier.search.request import SearchRequest
from espalier.search.schema import Option, declared, from_values, parse_size, violations
from espalier.search.service.grpc_api import convert
from espalier.v1 import search_pb2 as pb


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


# --- the command line ----------------------------------------------------------------------------------------------


def run(*arguments: object, env: dict[str, str] | None = None) -> tuple[int, str]:
    app, seen = CommandLine(), []

    @app.command()
    @with_schema
    def command(extra: int = 0, *, settings: Settings) -> None:
        seen.append(settings)

    ran = CliRunner().invoke(app, [str(a) for a in arguments], env=env)
    return ran.exit_code, repr(seen[0]) if seen else " ".join(ran.output.replace("│", " ").split())


def test_every_declared_field_is_an_option_and_no_other():
    code, shown = run("--help", env={"COLUMNS": "200"})
    assert code == 0
    for text in (
        "--count",
        "-c",
        "How many.",
        "between 1 and 9",
        "--no-loud",
        "[or not]",
        "TEST_SHARE",
        "default: (1M)",
    ):
        assert text in shown, text
    assert "--inner" not in shown


def test_the_line_goes_before_the_environment_and_that_before_the_file(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("count: 4\ncolour: blue\nmemory: 4K\nloud: false\nextra: 1\n")
    expected = Settings(6, 0.5, Colour.BLUE, False, 4096)
    assert run("--config", file, "-c", 6, env={"TEST_COUNT": "5", "TEST_SHARE": "0.5"}) == (0, repr(expected))
    assert run("--config", file)[1] == repr(Settings(4, None, Colour.BLUE, False, 4096))
    assert run("--config", file, env={"TEST_COUNT": "5"})[1] == repr(Settings(5, None, Colour.BLUE, False, 4096))


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.json", '{"count": 7}'), ("a.toml", "count = 7"), ("a.yml", "count: 7"), ("a.YAML", "count: 7")],
)
def test_options_are_read_from_every_kind_of_file_that_the_help_names(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert run("--config", tmp_path / name)[1] == repr(Settings(7))


@pytest.mark.parametrize(
    "text", ["extra = 1\n[test]\ncount = 7", "[Test]\ncount = 7", "count = 7\n[test]\nloud = true"]
)
def test_options_may_lie_in_tables_named_like_their_group_of_the_help(tmp_path, text):
    (tmp_path / "a.toml").write_text(text)
    assert run("--config", tmp_path / "a.toml")[1] == repr(Settings(7))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[test]\nextra = 1", "test.extra"),  # no option of that group
        ("[tset]\ncount = 7", "tset.count"),
        ("[test]\nmore = 1\n[other]\nx = 2", "test.more, other.x"),
        ("count = 7\n[test]\ncount = 7", "gives count twice"),
    ],
)
def test_a_key_that_no_group_has_is_refused_with_its_table(tmp_path, text, said):
    (tmp_path / "a.toml").write_text(text)
    app = typer.Typer()

    @app.command()
    @with_schema
    def command(extra: int = 0, *, settings: Settings) -> None:
        raise AssertionError

    ran = CliRunner().invoke(app, ["--config", str(tmp_path / "a.toml")])
    assert isinstance(ran.exception, OptionError)
    assert said in str(ran.exception)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", "cannot read"),
        ("a.yaml", "a: [", "cannot read"),
        ("a.toml", "= 7", "cannot read"),
        ("a.txt", "count: 7", "must end in .json, .toml, .yaml, .yml"),
        ("a.yaml", "7", "must hold options by name"),
        ("a.yaml", "cuont: 7", "no options of `solve`: cuont"),
    ],
)
def test_a_file_that_cannot_be_taken_is_refused_by_name(espalier, tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    ran = espalier("solve", "1+1?", "--config", tmp_path / name)
    assert ran.code == 2
    assert said in ran.err
    assert name in ran.err


def test_a_file_that_is_not_there_is_refused(espalier, tmp_path):
    assert "nowhere.yaml" in espalier("solve", "1+1?", "--config", tmp_path / "nowhere.yaml").err


# --- a new field ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LargerRequest(SearchRequest):
    """A request with one field more."""

    flavour: Annotated[int | None, Interval(ge=1, le=5), Option("What it tastes of.", short="-F")] = None


@pytest.fixture
def larger_message(monkeypatch) -> type:
    """The message of a request with the same field more."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    (message,) = [m for m in file.message_type if m.name == "SolveProblemRequest"]
    message.field.add(
        name="flavour", number=99, type=5, label=1, proto3_optional=True, oneof_index=len(message.oneof_decl)
    )
    message.oneof_decl.add(name="_flavour")
    pool = descriptor_pool.DescriptorPool()
    for name in ("google/protobuf/duration.proto",):
        pool.AddSerializedFile(descriptor_pool.Default().FindFileByName(name).serialized_pb)
    pool.Add(file)
    made = message_factory.GetMessageClass(pool.FindMessageTypeByName("espalier.v1.SolveProblemRequest"))
    monkeypatch.setitem(convert._DATACLASSES, "SolveProblemRequest", LargerRequest)
    monkeypatch.setattr(convert.pb, "SolveProblemRequest", made)
    return made


def test_a_new_field_is_checked_an_option_in_files_and_on_the_wire(larger_message):
    assert [v.field for v in violations(LargerRequest("x", flavour=6))] == ["flavour"]
    assert from_values(LargerRequest, {"problem": "x", "flavour": 2}) == LargerRequest("x", flavour=2)
    assert LargerRequest("x", flavour=2).to_dict()["flavour"] == 2

    app, seen = CommandLine(), []

    @app.command()
    @with_schema
    def solve(problem: str, *, request: LargerRequest) -> None:
        seen.append(request.flavour)

    assert CliRunner().invoke(app, ["x", "-F", "3"]).exit_code == 0
    assert seen == [3]

    message = convert.request_to_wire(LargerRequest("x", flavour=4), larger_message)
    assert message.flavour == 4  # pyright: ignore[reportAttributeAccessIssue]
    again = larger_message.FromString(message.SerializeToString())
    assert convert.request_from_wire(again) == (LargerRequest("x", flavour=4), [])


def test_every_field_of_a_request_but_its_texts_and_tools_is_an_option():
    tools = {"tools", "tool_choice", "parallel_tool_calls"}
    assert {f.name for f in declared(SearchRequest) if not f.option} == {"problem", "history", *tools}
