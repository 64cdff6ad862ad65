"""`python -m espalier.experiments.bench NAME`: each benchmark prints a table and writes JSON."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

JsonPath = Annotated[Path | None, typer.Option("--json", help="Where to write rows, ratios, machine and versions.")]


@app.callback()
def _bench() -> None:
    """Benchmarks; all contestants take turns in one run, and figures are medians."""


@app.command()
def engine(
    generator: Annotated[str, typer.Option(help="Checkpoint to decode with.")] = "demo-generator",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode for each sequence.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 5,
    json_path: JsonPath = None,
) -> None:
    """Decode tokens a second at batch 1 to 256, beside a bare torch loop on dense KV."""
    from espalier.experiments.bench.engine import run
    from espalier.experiments.bench.report import publish

    rows, ratios = run(generator, prompt_tokens, new_tokens, repeats)
    publish(f"decode, {prompt_tokens} + {new_tokens} tokens, float32", rows, ratios, json_path)


if __name__ == "__main__":
    app()
