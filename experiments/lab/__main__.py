"""`python -m espalier.experiments.lab GROUP NAME`: the commands of the laboratory, from one table."""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from espalier.experiments.cli.help import CommandLine, HelpGroup
from espalier.experiments.cli.main import run_app

GROUPS = {
    "bench": "Benchmarks; all contestants take turns in one run, and results are medians.",
    "recipe": "Make the demo pair: each stage is seeded and resumes where it stopped.",
    "study": "Measure how searches behave, and what tuning a verifier's trunk is worth.",
}
COMMANDS: dict[str, dict[str, str]] = {
    "bench": {
        "engine": "bench.engine.decode:command",
        "int8-weights": "bench.engine.int8_weights:command",
        "model-paths": "bench.engine.model_paths:command",
        "recurrent-tree": "bench.engine.recurrent_tree:command",
        "real-models": "bench.engine.real_models:command",
        "search": "bench.searches.rate:command",
        "search-floor": "bench.searches.floor:command",
        "drafts": "bench.engine.drafts:command",
        "prefix": "bench.engine.prefix:command",
        "executors": "bench.searches.executors:command",
        "host": "bench.engine.host:command",
        "guided": "bench.engine.guided:command",
        "long-path": "bench.searches.long_path:command",
        "gpu-kernels": "bench.gpu.kernels:command",
        "gpu": "bench.gpu.floor:command",
        "accuracy": "bench.searches.accuracy:command",
        "algorithms": "bench.searches.algorithms:command",
        "early-stop": "bench.searches.early_stop:command",
        "trunk-head": "bench.searches.trunk_head:command",
        "rollouts": "bench.engine.rollouts:command",
        "votes": "bench.searches.recorded_votes:command",
        "score-sessions": "bench.engine.score_sessions:command",
        "service": "bench.service.overhead:command",
        "service-fairness": "bench.service.neighbours:command",
        "service-gauges": "bench.service.scraped:command",
        "service-rollouts": "bench.service.remote_rollouts:command",
        "service-soak": "bench.service.soak:command",
        "all": "bench.everything:command",
    },
    "recipe": {
        "problems": "recipe.stages:problems",
        "generator": "recipe.stages:generator",
        "sample": "recipe.stages:sample",
        "trunk": "recipe.stages:trunk",
        "verifier": "recipe.stages:verifier",
        "thinking": "recipe.stages:thinking",
        "evaluate": "recipe.stages:evaluate",
        "all": "recipe.stages:everything",
    },
    "study": {
        "memory-and-time": "study.command:command",
        "fp8": "study.fp8:command",
        "stopping": "study.stopping:command",
        "tune-verifier": "tuning.command:command",
    },
}
"""The function of each command, by its group and name."""


class LazyGroup(HelpGroup):
    """The commands of one group of the table; a command's module is imported when the command is run."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands, in the table's order."""
        return list(COMMANDS[self.name or ""])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, its module imported; None if there is none."""
        if not (target := COMMANDS[self.name or ""].get(cmd_name)):
            return None
        module, _, function = target.partition(":")
        alone = CommandLine()
        alone.command(cmd_name)(getattr(import_module(f"{__package__}.{module}"), function))
        return typer.main.get_command(alone)

    def summary(self, ctx: Any, name: str) -> str:
        """The first paragraph of a command's docstring, read from its source: importing all modules takes seconds."""
        module, _, function = COMMANDS[self.name or ""][name].partition(":")
        spec = find_spec(f"{__package__}.{module}")
        assert spec is not None
        assert spec.origin is not None
        source = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        (found,) = (node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == function)
        return (ast.get_docstring(found) or "").partition("\n\n")[0]


def _group() -> None:
    """A group of commands needs a callback, as typer sees no commands of it."""


app = CommandLine(
    help="The laboratory of Espalier.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
for name, text in GROUPS.items():
    group = CommandLine(cls=LazyGroup, help=text, no_args_is_help=True)
    group.callback()(_group)
    app.add_typer(group, name=name)

if __name__ == "__main__":
    run_app(app)
