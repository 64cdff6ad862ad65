"""In the help of every command the names of options and environment variables are whole, at 80 columns and below."""

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from typer.main import get_command

from espalier.experiments.cli.commands.rollouts import OF_VERIFIERS
from espalier.experiments.cli.help import CommandLine
from espalier.experiments.cli.main import app
from espalier.experiments.cli.schema_options import Fields, with_schema
from espalier.search.run.settings import RuntimeSettings

ROOT = get_command(app)


def commands(group: Any = ROOT, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield above
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*above, name))


def command_at(path: tuple[str, ...]) -> Any:
    command: Any = ROOT
    for name in path:
        command = command.commands[name]
    return command


@pytest.mark.parametrize("columns", [80, 60])
def test_no_name_is_cut_or_broken(columns: int, espalier, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for path in commands():
        words = set(espalier(*path, "--help").out.translate(str.maketrans("[];:,", "     ")).split())
        for parameter in command_at(path).params:
            if not parameter.hidden and parameter.param_type_name == "option":
                variable = parameter.envvar if isinstance(parameter.envvar, str) else None
                assert {*parameter.opts, *parameter.secondary_opts, *([variable] if variable else [])} <= words, path
        for name in getattr(command_at(path), "commands", ()):
            assert name in words


def test_lines_are_no_wider_than_the_terminal_but_for_long_words(espalier, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for path in commands():
        for line in espalier(*path, "--help").out.splitlines():
            assert len(line) <= 80, (path, line)


def test_a_long_list_of_choices_stands_in_the_help_and_a_short_one_beside_the_name(espalier):
    shown = " ".join(espalier("solve", "--help").out.split())
    assert "-a, --algorithm One of greedy, chain, majority, best-of-n, adaptive, beam," in shown
    assert "--aggregation <last|min|prod|mean>" in shown


def test_commands_are_shown_with_their_whole_first_paragraph(espalier):
    shown = " ".join(espalier("--help").out.split())
    assert "replay Check that a recorded search makes the same decisions when replayed; needs no model." in shown


def test_options_without_an_effect_are_not_offered():
    options = {
        path: {parameter.name for parameter in command_at(path).params}
        for path in (("eval-prm",), ("rollouts",), ("learn-verifier",), ("eval",))
    }
    assert not options["eval-prm",] & {"system_prompt", "answer_equivalence", "grader_memory", "reserved_share"}
    assert not options["rollouts",] & {*OF_VERIFIERS}
    assert not options["learn-verifier",] & {*OF_VERIFIERS}
    assert options["eval",] >= {"system_prompt", "answer_equivalence", *OF_VERIFIERS}


def test_a_field_that_a_command_leaves_out_keeps_its_default(monkeypatch):
    seen: list[RuntimeSettings] = []
    line = CommandLine()

    @line.command()
    @with_schema
    def command(*, runtime: Annotated[RuntimeSettings, Fields(without=["system_prompt"])]) -> None:
        seen.append(runtime)

    monkeypatch.setenv("ESPALIER_SYSTEM_PROMPT", "for another command")
    line(["--block-size", "8"], standalone_mode=False)
    assert (seen[0].block_size, seen[0].system_prompt) == (8, None)
