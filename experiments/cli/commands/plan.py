"""`espalier plan`."""

import json
from dataclasses import replace
from typing import Annotated, Any

import typer

from espalier.engine.models.options import Quantization
from espalier.experiments.cli.runs import searches_for, verifier_for
from espalier.experiments.cli.schema_options import Only, with_schema
from espalier.experiments.planning.options import DeviceOptions, LengthOptions
from espalier.search.algorithms import named
from espalier.search.request import SearchRequest
from espalier.search.run.settings import AUTO, RuntimeSettings

_MODELS = (
    "verifier_family", "verifier_reference", "generator_quantization", "verifier_quantization", "offline", "cache_dir",
    "gpu_memory_utilization", "max_batch_tokens", "reserved_share", "block_size", "draft", "draft_tokens",
    "draft_quantization",
)  # fmt: skip


@with_schema
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
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    *,
    request: Annotated[SearchRequest, Only("algorithm", "beam_width", "expansion")],
    lengths: LengthOptions,
    device: DeviceOptions,
    runtime: Annotated[RuntimeSettings, Only(*_MODELS)],
) -> None:
    """Compute a search's KV memory, how many searches fit a device, and how fast it could be; reads no weights.

    Memory is expected, not worst-case: the paths that are kept are taken as a random choice of the children. Speed is a
    floor of bytes, products and launches; software adds to it.
    """
    from espalier.experiments.planning.known_models import MODELS
    from espalier.experiments.planning.plan import make_plan

    runtime = replace(runtime, generator=generator, verifier=verifier)
    (request,) = searches_for([request], runtime, generator in MODELS)
    request = named(request, "steps")
    if verifier == AUTO:
        runtime = replace(runtime, verifier=verifier_for([request], runtime, generator in MODELS))
    plan = make_plan(request, runtime, device, lengths)
    if as_json:
        print(json.dumps(plan, indent=2))
    else:
        shape = (
            f"N={request.beam_width}, M={request.expansion}, {lengths.steps} steps of {lengths.step_tokens:g} tokens"
        )
        _show(plan, f"{request.algorithm}, {shape}", device.card)


def _show(plan: dict[str, Any], title: str, card: str | None) -> None:
    from rich.console import Console

    from espalier.experiments.cli.render import grid_of, table_of

    console, search, fit = Console(), plan["search"], plan["searches_that_fit"]
    console.print(title, style="bold", highlight=False)
    rows = [
        (role, f"{model['name']}: weights {_size(model['weight_bytes'])} in {_precision(model, plan['dtype'])}, "
               f"KV {model['kv_bytes_per_token']:,} bytes a token"
               + (f", state {_size(model['state_bytes'])} a path" if model["state_bytes"] else ""))
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
    console.print(grid_of(rows))
    if not plan["speed"]:
        console.print("speed: give --card, or --bandwidth and --matrix-rate")
        return
    columns = "searches at once", "seconds per search", "rounds/s", "searches/min", "generator %"
    speeds = [
        (f"{row['searches']:,}", f"{row['seconds']:.3g}", f"{row['rounds_per_second']:.3g}",
         f"{60 * row['searches'] / row['seconds']:.3g}", f"{100 * row['generator_share']:.0f}")
        for row in plan["speed"]
    ]  # fmt: skip
    console.print(f"the floor on {card or 'this device'}; software adds to it", highlight=False)
    console.print(table_of(columns, speeds, columns))
    if plan["drafts"]:
        _show_drafts(console, plan["drafts"])


def _show_drafts(console: Any, drafts: dict[str, Any]) -> None:
    from espalier.experiments.cli.render import table_of

    batches, pays = drafts["batches"], drafts["pays_up_to"]
    where = "at every size" if pays is None else f"up to {pays:,} paths" if pays else "at no size"
    console.print(f"drafts, {100 * drafts['acceptance']:.0f}% of them accepted, pay {where}", highlight=False)
    columns = "paths in a step", "draft", "tokens of each", "ms", "ms without", "gain"
    rows = [
        (f"{row['rows']:,}", str(row["draft_tokens"]), f"{row['tokens_of_a_pass']:.2f}", f"{row['milliseconds']:.3g}",
         f"{row['milliseconds_without']:.3g}", f"{row['gain']:.2f}")
        for row in batches
    ]  # fmt: skip
    console.print(table_of(columns, rows, columns))


def _precision(model: dict[str, Any], dtype: str) -> str:
    return dtype if model["quantization"] == Quantization.NONE else f"{model['quantization']} and {dtype}"


def _size(size: float) -> str:
    unit, power = ("GiB", 30) if size >= 2**30 else ("MiB", 20) if size >= 2**20 else ("KiB", 10)
    return f"{size / 2**power:.1f} {unit}"
