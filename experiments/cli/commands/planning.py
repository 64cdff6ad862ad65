"""`espalier models`: what a checkpoint would be loaded as; `espalier plan`: memory and time of a search on paper."""

from dataclasses import asdict, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval
from rich.console import Console
from rich.text import Text
from typer import Argument

from espalier.engine.models.options import Quantization
from espalier.experiments.cli.help import CommandLine
from espalier.experiments.cli.render import grid_of, size_of, table_of
from espalier.experiments.cli.runs import searches_for, verifier_for
from espalier.experiments.cli.schema_options import Fields, Outcome, with_schema
from espalier.experiments.planning.options import DeviceOptions, LengthOptions
from espalier.search.algorithms import named
from espalier.search.request import SearchRequest
from espalier.search.run.settings import AUTO, RuntimeSettings
from espalier.search.schema import option

if TYPE_CHECKING:
    from espalier.engine.models.config import DecoderConfig
    from espalier.experiments.planning.inspection import Inspection

_RUNTIME = "device", "dtype", "verifier_family", "verifier_reference", "model_impl", "offline", "cache_dir"
_MODELS = (
    "verifier_family", "verifier_reference", "generator_quantization", "verifier_quantization", "offline", "cache_dir",
    "gpu_memory_utilization", "max_batch_tokens", "reserved_share", "block_size", "draft", "draft_tokens",
    "draft_quantization",
)  # fmt: skip
_OF_HEAD = "the hidden state that a step's last token is drawn from; no token and no KV of its own"

app = CommandLine(help="Look at checkpoints.", no_args_is_help=True)


@app.callback()
def _models() -> None:
    """Look at checkpoints."""


@app.command("inspect")
@with_schema
def inspect_command(
    checkpoints: Annotated[list[str], Argument(help="Folders, Hugging Face ids or bundled names; all on one device.")],
    path_tokens: int = option(1024, "Tokens of one path, including the prompt, for --memory.", Interval(ge=1)),
    quantization: Quantization = option(Quantization.NONE, "Quantization of the weights."),
    *,
    card: Annotated[DeviceOptions, Fields(only=["memory"])],
    runtime: Annotated[RuntimeSettings, Fields(only=_RUNTIME)],
) -> Outcome:
    """Show the role, prompts and memory of checkpoints, without reading weights.

    The tensors of local folders are checked by name and shape. Sizes are for the dtype used on --device (float32 on a
    CPU) unless --dtype is given. With --memory, also how many paths fit besides the weights. Give --verifier-family for
    verifiers whose class may also be a generator's.
    """
    from espalier.experiments.planning.inspection import inspect_checkpoint, inspect_trunk_head, paths_that_fit
    from espalier.search.run.load import resolve_dtype  # imports torch

    kind = resolve_dtype(runtime.dtype, runtime.device)
    models: list[Inspection] = []
    found: list[tuple[dict[str, Any], list[tuple[str, str]]]] = []
    for name in checkpoints:
        if head := inspect_trunk_head(name, runtime):
            weights = f"{head['layers']} layers, {_size(head['weight_bytes'])}"
            trunk = f"{head['trunk'] or 'a generator'} (digest {head['trunk_digest']})"
            rows = [("role", "verifier: trunk-head"), ("reads", _OF_HEAD), ("trunk", trunk), ("weights", weights)]
            found.append((head, rows))
        else:
            models.append(inspect_checkpoint(name, kind, quantization, runtime))
            found.append((_plain(models[-1]), _rows(models[-1])))
    left, paths = (0, 0) if card.memory is None else paths_that_fit(models, card.memory, path_tokens)
    fit = None if card.memory is None else {"kv_bytes": left, "paths": paths, "path_tokens": path_tokens}

    def show(console: Console) -> None:
        for name, (values, rows) in zip(checkpoints, found, strict=True):
            console.print(Text.assemble((name, "bold"), f"  {values['architecture']}"))
            console.print(grid_of(rows, (0, 2, 0, 2)))
        if card.memory is None:
            return
        available, weights = _size(card.memory), _size(sum(i.weight_bytes for i in models))
        if not left:
            console.print(f"{weights} of weights do not fit in {available}; try --quantization int8 or int4")
            return
        per_token = sum(i.kv_bytes_per_token for i in models)
        tokens = f"{left // per_token:,} tokens, or " if per_token and not any(i.state_bytes for i in models) else ""
        console.print(
            f"In {available}: {weights} of weights leave {_size(left)} for KV, with 5% reserved for activations: "
            f"{tokens}{paths:,} paths of {path_tokens:,} tokens that share nothing; searches share prefixes and fit "
            "more."
        )

    return Outcome({"checkpoints": [values for values, _ in found], "fit": fit}, show)


def _plain(inspection: "Inspection") -> dict[str, Any]:
    """Values for JSON."""
    match, config = inspection.match, asdict(inspection.config)
    found = {field.name: getattr(inspection, field.name) for field in fields(inspection) if field.name != "match"}
    return found | {
        "dtype": _dtype(inspection),
        "family": match and match.info.name,
        "reason": match and match.reason,
        "config": {name: value for name, value in config.items() if name not in ("calls", "groups", "products")},
        "readings": [{"before": before, "token": token} for before, token in inspection.readings],
        "ends": [asdict(end) for end in inspection.ends],
    }


def _rows(inspection: "Inspection") -> list[tuple[str, str]]:
    """Names and texts for readers; those without a text are not shown."""
    match, config = inspection.match, inspection.config
    stored = "all tensors checked" if inspection.has_weights else "according to config.json: there are no weight files"
    scored = [
        (f"step {step} is scored", f"…{_visible(before)} ▸{_visible(token)}◂")
        for step, (before, token) in enumerate(inspection.readings, start=1)
    ]
    special = ", ".join(f"{token} ({i})" for token, i in inspection.special_tokens.items()) or "none"
    if (bos := inspection.bos_token) and bos not in inspection.special_tokens:
        special += f"; bos_token {bos} is named, and not added"
    sampling, answering = (
        ", ".join(f"{name} {value:g}" for name, value in values.items())
        for values in (inspection.sampling, inspection.answering)
    )
    return [
        ("role", inspection.role if match is None else f"{inspection.role}: {match.info.name}"),
        ("reason", match.reason if match else ""),
        ("score", match.info.score if match else ""),
        ("or", inspection.note),
        ("adapter", f"{inspection.adapter}, merged as it loads" if inspection.adapter else ""),
        ("decoder", _decoder(config)),
        ("runs by", "native code" if config.impl == "native" else "transformers' code"),
        ("context", f"{config.max_positions:,} tokens"),
        ("weights", f"{_size(inspection.weight_bytes)} ({stored})"),
        ("in files", _why_larger(inspection)),
        ("stored as", inspection.stored and f"{inspection.stored}; expanded as it loads"),
        ("KV", f"{inspection.kv_bytes_per_token:,} bytes a token in {_dtype(inspection)}"),
        ("state", f"{_size(inspection.state_bytes)} a path, whatever its length" if inspection.state_bytes else ""),
        ("prompt", _visible(inspection.prompt)),
        *scored,
        ("special tokens", f"{special} ({inspection.special_source})"),
        ("sampled with", sampling and f"{sampling}; unless a request says otherwise"),
        ("thinking off", answering and f"sampled with {answering}; else as generation_config.json says"),
        *(("ends at", f"{end.token} ({end.token_id}): {', '.join(end.sources)}") for end in inspection.ends),
        *(("warning", text) for text in inspection.warnings),
    ]


def _decoder(config: "DecoderConfig") -> str:
    windows = sorted({window for window in config.windows if window})
    parts = [
        f"{config.num_layers} layers of {config.hidden_size}",
        f"{config.num_heads} heads, {config.num_kv_heads} KV heads of {config.head_dim}",
        f"vocabulary of {config.vocab_size:,}{', tied' if config.tied else ''}",
    ]
    scaled = ((r, f", {r.scaling['rope_type']}" if r.scaling else "") for r in config.rotaries if r.theta)
    if bases := dict.fromkeys(f"{rotary.theta:,.0f}{scaling}" for rotary, scaling in scaled):
        parts.append(f"rotary base {' and '.join(bases)}")
    if windows:
        parts.append(f"windows of {' and '.join(map(str, windows))} in {sum(map(bool, config.windows))} layers")
    return "; ".join(parts)


def _why_larger(inspection: "Inspection") -> str:
    """Say what weights take in their files, and why it is less than in memory; empty where it is no less."""
    if inspection.weight_bytes <= 1.05 * inspection.file_bytes or not inspection.file_bytes:
        return ""
    text = f"{_size(inspection.file_bytes)}, most of it as {inspection.file_kind}, which is widened as it loads"
    if inspection.quantization is not Quantization.NONE:
        return f"{text} to {inspection.quantization} in the layers, and {_dtype(inspection)} elsewhere"
    width = inspection.dtype.itemsize
    smaller = ", --dtype bfloat16 takes half" if width == 4 else ""
    return f"{text} to {_dtype(inspection)}, {width} bytes each{smaller}; --quantization int8 takes a byte each"


def _dtype(inspection: "Inspection") -> str:
    return str(inspection.dtype).removeprefix("torch.")


def _visible(text: str) -> str:
    return text.replace("\n", "⏎")


_size = partial(size_of, digits=2)


@with_schema
def plan_command(
    generator: str = option("demo-generator", "Folder, Hugging Face id, bundled name, or a known shape: Qwen2.5-1.5B."),
    verifier: str = option(AUTO, "As --generator; self; '' for none; auto is the verifier of demo-generator."),
    *,
    request: Annotated[SearchRequest, Fields(only=("algorithm", "beam_width", "expansion"))],
    lengths: LengthOptions,
    device: DeviceOptions,
    runtime: Annotated[RuntimeSettings, Fields(only=_MODELS)],
) -> Outcome:
    """Compute a search's KV memory, how many searches fit a device, and how fast it could be; reads no weights.

    Memory is expected, not worst-case: the paths that are kept are taken as a random choice of the children. Speed is a
    floor of bytes, products and launches; software adds to it.
    """
    from espalier.experiments.planning.plan import make_plan

    runtime = replace(runtime, generator=generator, verifier=verifier)
    (request,) = searches_for([request], runtime)
    request = named(request, "steps")
    if verifier == AUTO:
        runtime = replace(runtime, verifier=verifier_for([request], runtime))
    plan = make_plan(request, runtime, device, lengths)
    shape = f"N={request.beam_width}, M={request.expansion}, {lengths.steps} steps of {lengths.step_tokens:g} tokens"
    return Outcome(plan, partial(_show, plan, f"{request.algorithm}, {shape}", device.card))


def _show(plan: dict[str, Any], title: str, card: str | None, console: Console) -> None:
    search, fit, device = plan["search"], plan["searches_that_fit"], plan["device"]
    console.print(title, style="bold")
    rows = [(role, _model_text(model, plan["dtype"])) for role, model in plan["models"].items()]
    by_role = ", ".join(f"{role} {size_of(size)}" for role, size in search["peak_bytes_by_role"].items())
    peak, mean, most, logical, pool, weights = map(size_of, (
        search["peak_bytes"], search["mean_bytes"], search["worst_case_bytes"], search["logical_peak_bytes"],
        device["kv_pool_bytes"], device["weight_bytes"],
    ))  # fmt: skip
    saved = search["logical_peak_bytes"] / search["peak_bytes"]
    rows += [
        ("KV of a search", f"{peak} at the peak ({by_role}), {mean} on average; {most} at the very most"),
        ("without sharing", f"{logical} at the peak: {saved:.1f} times as much"),
        ("KV pool", f"{pool} beside {weights} of weights"),
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
    console.print(f"the floor on {card or 'this device'}; software adds to it")
    console.print(table_of(columns, speeds, columns))
    if drafts := plan["drafts"]:
        pays = drafts["pays_up_to"]
        where = "at every size" if pays is None else f"up to {pays:,} paths" if pays else "at no size"
        console.print(f"drafts, {100 * drafts['acceptance']:.0f}% of them accepted, pay {where}")
        columns = "paths in a step", "draft", "tokens of each", "ms", "ms without", "gain"
        gains = [
            (f"{row['rows']:,}", str(row["draft_tokens"]), f"{row['tokens_of_a_pass']:.2f}",
             f"{row['milliseconds']:.3g}", f"{row['milliseconds_without']:.3g}", f"{row['gain']:.2f}")
            for row in drafts["batches"]
        ]  # fmt: skip
        console.print(table_of(columns, gains, columns))


def _model_text(model: dict[str, Any], dtype: str) -> str:
    kept = dtype if model["quantization"] == Quantization.NONE else f"{model['quantization']} and {dtype}"
    state = f", state {size_of(model['state_bytes'])} a path" if model["state_bytes"] else ""
    weights, kv = size_of(model["weight_bytes"]), f"{model['kv_bytes_per_token']:,} bytes a token"
    return f"{model['name']}: weights {weights} in {kept}, KV {kv}{state}"
