"""`espalier plan`."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from espalier.engine.models.options import Quantization
from espalier.experiments.cli.options import OptionError
from espalier.experiments.cli.runs import verifier_for
from espalier.experiments.cli.schema_options import option, size_parser
from espalier.search.request import AlgorithmName, SearchRequest, validate
from espalier.search.run.load import AUTO, RuntimeSettings

if TYPE_CHECKING:
    from espalier.experiments.planning.roofline import Card

_DEVICE = "Device"
_LENGTHS = "Problem"
_MANY = (1, 8, 32)
"""Searches at once for which the speed is shown, besides as many as fit."""


def plan_command(
    generator: Annotated[
        str, typer.Option(help="Folder, Hugging Face id, bundled name, or a known shape such as Qwen2.5-1.5B.")
    ] = "demo-generator",
    verifier: Annotated[
        str,
        typer.Option(
            help="As --generator, such as Qwen2.5-Math-PRM-7B; or self; '' for none; auto is that of demo-generator."
        ),
    ] = AUTO,
    verifier_family: Annotated[str | None, option(RuntimeSettings, "verifier_family")] = None,
    verifier_reference: Annotated[str, option(RuntimeSettings, "verifier_reference")] = "",
    generator_quantization: Annotated[
        Quantization, option(RuntimeSettings, "generator_quantization")
    ] = Quantization.NONE,
    verifier_quantization: Annotated[
        Quantization, option(RuntimeSettings, "verifier_quantization")
    ] = Quantization.NONE,
    algorithm: Annotated[AlgorithmName, option(SearchRequest, "algorithm")] = AlgorithmName.BEAM,
    beam_width: Annotated[int, option(SearchRequest, "beam_width")] = 4,
    expansion: Annotated[int, option(SearchRequest, "expansion")] = 4,
    card: Annotated[
        str | None,
        typer.Option(help="a100, h100 or h200; cpu measures this machine.", rich_help_panel=_DEVICE),
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            parser=size_parser, metavar="SIZE", help="The device's memory, like 24G.", rich_help_panel=_DEVICE
        ),
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(min=0.001, help="Memory bandwidth, GB/s.", rich_help_panel=_DEVICE)
    ] = None,
    matrix_rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Matrix products in --dtype, TFLOP/s.", rich_help_panel=_DEVICE),
    ] = None,
    gpu_memory_utilization: Annotated[float, option(RuntimeSettings, "gpu_memory_utilization")] = 0.9,
    max_batch_tokens: Annotated[int, option(RuntimeSettings, "max_batch_tokens")] = 2048,
    reserved_share: Annotated[float, option(RuntimeSettings, "reserved_share")] = 0.25,
    block_size: Annotated[int, option(RuntimeSettings, "block_size")] = 16,
    dtype: Annotated[
        str, typer.Option(help="auto is float32 for --card cpu, else bfloat16.", rich_help_panel=_DEVICE)
    ] = "auto",
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the prompt.", rich_help_panel=_LENGTHS)
    ] = 200,
    steps: Annotated[
        int, typer.Option(min=1, max=128, help="Steps of a path: rounds of the search.", rich_help_panel=_LENGTHS)
    ] = 10,
    step_tokens: Annotated[
        float, typer.Option(min=1, max=2048, help="Tokens of a step.", rich_help_panel=_LENGTHS)
    ] = 50,
    verifier_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Default: --prompt-tokens.", rich_help_panel=_LENGTHS)
    ] = None,
    verifier_step_tokens: Annotated[
        float | None,
        typer.Option(min=1, max=4096, help="With separators; default: --step-tokens.", rich_help_panel=_LENGTHS),
    ] = None,
    merged_share: Annotated[
        float,
        typer.Option(
            min=0, max=0.99, help="Share of sampled steps that equal a sibling, and are merged.",
            rich_help_panel=_LENGTHS,
        ),
    ] = 0.0,
    offline: Annotated[bool, option(RuntimeSettings, "offline")] = False,
    cache_dir: Annotated[Path | None, option(RuntimeSettings, "cache_dir")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:  # fmt: skip
    """Compute a search's KV memory, how many searches fit a device, and how fast it could be; reads no weights.

    Memory is expected, not worst-case: the paths that are kept are taken as a random choice of the children. Speed is a
    floor of bytes, products and launches; software adds to it.
    """
    import torch

    from espalier.engine.models.hub import HubSettings
    from espalier.engine.roles import GENERATOR, VERIFIER
    from espalier.experiments.planning.closed_form import PathLengths, TreeShape
    from espalier.experiments.planning.devices import (
        CARD_MEMORY,
        CPU,
        card_named,
        cpu_kv_memory,
        planned_model,
    )
    from espalier.experiments.planning.inspection import verifier_checkpoint
    from espalier.experiments.planning.known_models import MODELS
    from espalier.experiments.planning.plan import kv_pool_bytes, search_plan, speed_plan
    from espalier.prm.scorers import SELF
    from espalier.search.algorithms import needs_verifier
    from espalier.search.run.load import DTYPES

    request = SearchRequest("-", algorithm, beam_width, expansion, max_steps=steps)
    validate(request)
    if dtype not in DTYPES:
        raise OptionError(f"--dtype takes one of {', '.join(DTYPES)}, is {dtype!r}")
    if card is None and memory is None:
        raise OptionError("--card or --memory is needed: a100, h100, h200 or cpu; or the device's memory, like 24G")
    speed = _speed(card_named(card) if card else None, bandwidth, matrix_rate)
    name = ("float32" if card == CPU else "bfloat16") if dtype == "auto" else dtype
    hub = HubSettings(offline, cache_dir)
    if verifier == AUTO:
        verifier = verifier_for([request], RuntimeSettings(generator), generator in MODELS)
    wanted = {GENERATOR: generator}
    if verifier and needs_verifier(request):
        wanted[VERIFIER] = verifier if verifier in MODELS else verifier_checkpoint(verifier, generator, hub)
    how = {
        GENERATOR: (generator_quantization, None, ""),
        VERIFIER: (verifier_quantization, verifier_family, verifier_reference),
    }
    models = {
        role: planned_model(its, role, getattr(torch, name), hub, *how[role])
        for role, its in wanted.items()
        if its and not (role == VERIFIER and verifier == SELF)
    }
    if verifier == SELF and VERIFIER in wanted:  # the generator's weights, with a KV of its own
        its = models[GENERATOR]
        models[VERIFIER] = replace(its, memory_bytes=0, shape=replace(its.shape, outputs=2))
    tree = TreeShape(request, steps, merged_share)
    lengths = {
        GENERATOR: PathLengths(prompt_tokens, step_tokens, pending_tokens=1),
        VERIFIER: PathLengths(verifier_prompt_tokens or prompt_tokens, verifier_step_tokens or step_tokens),
    }
    search = search_plan(tree, models, lengths, block_size)
    if card == CPU and memory is None:
        weights, pool = sum(model.memory_bytes for model in models.values()), cpu_kv_memory()
    else:
        total = memory if memory is not None else CARD_MEMORY[card or ""]
        weights, pool = kv_pool_bytes(models, total, gpu_memory_utilization, max_batch_tokens)
    fit = {
        "at_their_peaks": int(pool // search.peak_bytes),
        "on_average": int(pool // search.mean_bytes),
        "admitted": int(pool // max(1.0, reserved_share * search.worst_case_bytes)),
    }
    counts = sorted({*(count for count in _MANY if count <= fit["on_average"]), max(1, fit["on_average"])})
    speeds = [speed_plan(tree, models, lengths, speed, count, block_size) for count in counts] if speed else []
    plain: dict[str, Any] = {
        "models": {
            role: {
                "name": wanted[role],
                "weight_bytes": model.memory_bytes,
                "quantization": str(model.shape.quantization),
                "kv_bytes_per_token": model.shape.kv_bytes_per_token,
            }
            for role, model in models.items()
        },
        "dtype": name,
        "search": {
            "rounds": [dict(held) for held in search.rounds],
            "peak_bytes": search.peak_bytes,
            "peak_bytes_by_role": dict(search.fullest),
            "mean_bytes": search.mean_bytes,
            "logical_peak_bytes": search.logical_peak_bytes,
            "worst_case_bytes": search.worst_case_bytes,
        },
        "device": {"weight_bytes": weights, "kv_pool_bytes": pool},
        "searches_that_fit": fit,
        "speed": [asdict(row) for row in speeds],
    }
    if as_json:
        print(json.dumps(plain, indent=2))
    else:
        _show(plain, f"{algorithm}, N={beam_width}, M={expansion}, {steps} steps of {step_tokens:g} tokens", card)


def _speed(card: "Card | None", bandwidth: float | None, matrix_rate: float | None) -> "Card | None":
    """The device's speed; None if nothing is known of it."""
    from espalier.experiments.planning.roofline import Card

    if card is None:
        if (bandwidth is None) != (matrix_rate is None):
            raise OptionError("--bandwidth and --matrix-rate go together, or with --card")
        return Card(1e9 * bandwidth, 1e12 * matrix_rate) if bandwidth and matrix_rate else None
    changes = {"bandwidth": bandwidth and 1e9 * bandwidth, "matrix_rate": matrix_rate and 1e12 * matrix_rate}
    return replace(card, **{field: value for field, value in changes.items() if value})


def _show(plan: dict[str, Any], title: str, card: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console, search, fit = Console(), plan["search"], plan["searches_that_fit"]
    console.print(title, style="bold", highlight=False)
    rows = [
        (role, f"{model['name']}: weights {_size(model['weight_bytes'])} in {_precision(model, plan['dtype'])}, "
               f"KV {model['kv_bytes_per_token']:,} bytes a token")
        for role, model in plan["models"].items()
    ]  # fmt: skip
    by_role = ", ".join(f"{role} {_size(size)}" for role, size in search["peak_bytes_by_role"].items())
    saved = search["logical_peak_bytes"] / search["peak_bytes"]
    rows += [
        ("KV of a search", f"{_size(search['peak_bytes'])} at the peak ({by_role}), {_size(search['mean_bytes'])} on "
                           f"average; {_size(search['worst_case_bytes'])} at the very most"),
        ("without sharing", f"{_size(search['logical_peak_bytes'])} at the peak: {saved:.1f} times as much"),
        ("KV pool", f"{_size(plan['device']['kv_pool_bytes'])} beside {_size(plan['device']['weight_bytes'])} of "
                    "weights"),
        ("searches that fit", f"{fit['on_average']:,} spread over their rounds, {fit['at_their_peaks']:,} all at their "
                              f"peaks, {fit['admitted']:,} by what is reserved when they start"),
    ]  # fmt: skip
    table = Table(show_header=False, box=None)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if not plan["speed"]:
        console.print("speed: give --card, or --bandwidth and --matrix-rate")
        return
    speeds = Table("searches at once", "seconds per search", "rounds/s", "searches/min", "generator %")
    for row in plan["speed"]:
        per_minute = 60 * row["searches"] / row["seconds"]
        values = f"{row['seconds']:.3g}", f"{row['rounds_per_second']:.3g}", f"{per_minute:.3g}"
        speeds.add_row(f"{row['searches']:,}", *values, f"{100 * row['generator_share']:.0f}")
    console.print(f"the floor on {card or 'this device'}; software adds to it", highlight=False)
    console.print(speeds)


def _precision(model: dict[str, Any], dtype: str) -> str:
    return dtype if model["quantization"] == Quantization.NONE else f"{model['quantization']} and {dtype}"


def _size(size: float) -> str:
    unit, power = ("GiB", 30) if size >= 2**30 else ("MiB", 20) if size >= 2**20 else ("KiB", 10)
    return f"{size / 2**power:.1f} {unit}"
