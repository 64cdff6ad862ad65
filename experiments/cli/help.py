"""Plain help, in which the names of options and environment variables are whole at any width.

typer's own help is a table, and cuts what is wider than its columns: at 80 characters a third of our options.
"""

import re
import textwrap
from collections import defaultdict
from itertools import pairwise
from typing import Any

import typer
from typer import Typer
from typer.core import TyperCommand, TyperGroup

from espalier.engine.errors import nearest, rule_of

_ARGUMENTS, _OPTIONS = "Arguments", "Options"
_OPTION_COLUMN, _COMMAND_COLUMN = 30, 18
_ALGORITHM = ("-a", "--algorithm")
_UsageError: Any = typer.BadParameter.__base__  # click's, which typer may bring with it
_NO_CHOICE = re.compile(r"'(.*?)' is not one of (.*)", re.DOTALL)
_QUOTED = re.compile(r"'([^']*)'")
_MAX_CHOICES = 40
"""Characters of a list of choices that stands beside the option's name; a longer one stands in its help."""


class _PlainHelp:
    """Writes the options of a command in the groups of their panels."""

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        """Write the options."""
        groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                panel = _ARGUMENTS if parameter.param_type_name == "argument" else _OPTIONS
                groups[getattr(parameter, "rich_help_panel", None) or panel].append(record)
        for panel, records in groups.items():
            with formatter.section(panel):
                for names, text in records:
                    _write_option(formatter, names, text)


class HelpCommand(_PlainHelp, TyperCommand):
    """A command whose help has the options in the groups of their panels."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments.

        An option that is none names the form of parameters of the user's own algorithm, a value that is none of a few
        the one that is most like it.
        """
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            own = next((name for flag, name in pairwise(given) if flag in _ALGORITHM and ":" in name), "")
            if own and (option := getattr(error, "option_name", "")):
                name = option.lstrip("-").replace("-", "_")
                error.message += f"; a parameter of a class of yours follows its name: {own}:{name}=VALUE"
            error.message = rule_of(error.message).replace("Input should be", "must be")  # typer validates by pydantic
            found = _NO_CHOICE.match(error.message)
            if found and (hint := nearest(found[1], _QUOTED.findall(found[2]))) and hint not in error.message:
                error.message = error.message.removesuffix(".") + hint
            raise


class HelpGroup(_PlainHelp, TyperGroup):
    """A group of commands, whose help has the whole first paragraph of each."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options and the commands."""
        super().format_options(ctx, formatter)
        with formatter.section("Commands"):
            for name in self.list_commands(ctx):
                _write_row(formatter, name, self.summary(ctx, name), _COMMAND_COLUMN)

    def summary(self, ctx: Any, name: str) -> str:
        """The first paragraph of a command's help."""
        command = self.get_command(ctx, name)
        return ((command and command.help) or "").partition("\n\n")[0]


class CommandLine(Typer):
    """A typer application with plain help and errors."""

    def __init__(self, **options: Any) -> None:
        """Create an application; see `Typer`."""
        super().__init__(**{"cls": HelpGroup, "rich_markup_mode": None, **options})

    def command(self, *given: Any, **options: Any) -> Any:
        """Register a command; see `Typer.command`."""
        return super().command(*given, **{"cls": HelpCommand, **options})


def _write_option(formatter: Any, names: str, text: str) -> None:
    names, _, metavar = names.partition(" <")
    if len(metavar) > _MAX_CHOICES:
        text = f"One of {', '.join(metavar.removesuffix('>').split('|'))}. {text}"
    elif metavar:
        names = f"{names} <{metavar}"
    _write_row(formatter, names, text, _OPTION_COLUMN)


def _write_row(formatter: Any, name: str, text: str, column: int) -> None:
    """Write a name, and its text in a column beside it, or below where the name reaches into that."""
    first = " " * formatter.current_indent + name
    beside = len(first) + 2 <= column
    lines = textwrap.wrap(
        " ".join(text.split()),
        width=formatter.width,
        initial_indent=first.ljust(column) if beside else " " * column,
        subsequent_indent=" " * column,
        break_long_words=False,
        break_on_hyphens=False,
    )
    formatter.write("\n".join([*([] if beside and lines else [first]), *lines]) + "\n")
