"""`espalier models`: shows what a checkpoint would be loaded as, without loading it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated

import typer

from espalier.engine.models.options import Quantization
from espalier.experiments.cli.help import CommandLine
from espalier.experiments.cli.schema_options import Only, with_schema
from espalier.experiments.planning.options import DeviceOptions
from espalier.search.run.settings import RuntimeSettings

if TYPE_CHECKING:
    from espalier.engine.models.config import DecoderConfig
    from espalier.experiments.planning.inspection import HeadInspection, Inspection

app = CommandLine(help="Look at checkpoints.", no_args_is_help=True)


@app.callback()
def _models() -> None:
    """Look at checkpoints."""


@app.command("inspect")
@with_schema
def inspect_command(
    checkpoints: Annotated[
        list[str], typer.Argument(help="Folders, Hugging Face ids or bundled names; all on one device.")
    ],
    path_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of one path, including the prompt, for --memory.")
    ] = 1024,
    quantization: Annotated[Quantization, typer.Option(help="Quantization of the weights.")] = Quantization.NONE,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    *,
    card: Annotated[DeviceOptions, Only("memory")],
    runtime: Annotated[
        RuntimeSettings,
        Only("device", "dtype", "verifier_family", "verifier_reference", "model_impl", "offline", "cache_dir"),
    ],
) -> None:
    """Show the role, prompts and memory of checkpoints, without reading weights.

    The tensors of local folders are checked by name and shape. Sizes are for the dtype used on --device (float32 on a
    CPU) unless --dtype is given. With --memory, also how many paths fit besides the weights. Give --verifier-family for
    verifiers whose class may also be a generator's.
    """
    from espalier.engine.models.hub import HubSettings
    from espalier.experiments.planning.inspection import (
        Inspection,
        inspect_checkpoint,
        inspect_trunk_head,
        paths_that_fit,
    )
    from espalier.search.run.load import resolve_dtype

    hub = HubSettings(runtime.offline, runtime.cache_dir)
    kind = resolve_dtype(runtime.dtype, runtime.device)
    how = quantization, runtime.verifier_family, runtime.verifier_reference, hub
    found = [
        inspect_trunk_head(name, hub) or inspect_checkpoint(name, kind, *how, model_impl=runtime.model_impl)
        for name in checkpoints
    ]
    models = [each for each in found if isinstance(each, Inspection)]
    fit = None if card.memory is None else paths_that_fit(models, card.memory, path_tokens)
    if as_json:
        fitting = fit and {"kv_bytes": fit[0], "paths": fit[1], "path_tokens": path_tokens}
        print(json.dumps({"checkpoints": [_plain(i) for i in found], "fit": fitting}, indent=2))
        return
    _show(checkpoints, found, models, fit, card.memory, path_tokens)


def _show(
    names: list[str],
    found: "Sequence[Inspection | HeadInspection]",
    models: "list[Inspection]",
    fit: tuple[int, int] | None,
    available: int | None,
    path_tokens: int,
) -> None:
    from rich.console import Console

    from espalier.experiments.cli.render import grid_of

    console = Console()
    for name, inspection in zip(names, found, strict=True):
        console.print(f"[bold]{name}[/]  {inspection.architecture}")
        console.print(grid_of(_rows(inspection), (0, 2, 0, 2)))
    if fit is None or available is None:
        return
    left, paths = fit
    weights = sum(i.weight_bytes for i in models)
    if not left:
        console.print(f"{_size(weights)} of weights do not fit in {_size(available)}; try --quantization int8 or int4")
        return
    per_token = sum(i.kv_bytes_per_token for i in models)
    tokens = f"{left // per_token:,} tokens, or " if per_token and not any(i.state_bytes for i in models) else ""
    console.print(
        f"In {_size(available)}: {_size(weights)} of weights leave {_size(left)} for KV, with 5% reserved for "
        f"activations: {tokens}{paths:,} paths of {path_tokens:,} tokens that share nothing; "
        "searches share prefixes and fit more."
    )


def _rows(inspection: "Inspection | HeadInspection") -> list[tuple[str, str]]:
    from espalier.experiments.planning.inspection import HeadInspection

    if isinstance(inspection, HeadInspection):
        return [
            ("role", "verifier: trunk-head"),
            ("reads", "the hidden state that a step's last token is drawn from; no token and no KV of its own"),
            ("trunk", f"{inspection.trunk or 'a generator'} (digest {inspection.trunk_digest})"),
            ("weights", f"{inspection.layers} layers, {_size(inspection.weight_bytes)}"),
        ]
    match, config = inspection.match, inspection.config
    rows = [("role", inspection.role if match is None else f"{inspection.role}: {match.info.name}")]
    if match:
        rows += [("reason", match.reason), ("score", match.info.score)]
    if inspection.note:
        rows.append(("or", inspection.note))
    stored = "all tensors checked" if inspection.has_weights else "according to config.json: there are no weight files"
    rows += [
        *([("adapter", f"{inspection.adapter}, merged as it loads")] if inspection.adapter else ()),
        ("decoder", _decoder(config)),
        ("runs by", "native code" if config.impl == "native" else "transformers' code"),
        ("context", f"{config.max_positions:,} tokens"),
        ("weights", f"{_size(inspection.weight_bytes)} ({stored})"),
        *([("in files", why)] if (why := _why_larger(inspection)) else ()),
        *([("stored as", f"{inspection.stored}; expanded as it loads")] if inspection.stored else ()),
        ("KV", f"{inspection.kv_bytes_per_token:,} bytes a token in {_dtype(inspection)}"),
        *(
            [("state", f"{_size(inspection.state_bytes)} a path, whatever its length")]
            if inspection.state_bytes
            else ()
        ),
        ("prompt", _visible(inspection.prompt)),
    ]
    for step, (before, token) in enumerate(inspection.readings, start=1):
        rows.append((f"step {step} is scored", f"…{_visible(before)} ▸{_visible(token)}◂"))
    rows.append(("special tokens", _special_tokens(inspection)))
    if inspection.sampling:
        values = ", ".join(f"{name} {value:g}" for name, value in inspection.sampling.items())
        rows.append(("sampled with", f"{values}; unless a request says otherwise"))
    if inspection.answering:
        values = ", ".join(f"{name} {value:g}" for name, value in inspection.answering.items())
        rows.append(("thinking off", f"sampled with {values}; else as generation_config.json says"))
    rows += [("ends at", f"{end.token} ({end.token_id}): {', '.join(end.sources)}") for end in inspection.ends]
    return rows + [("warning", text) for text in inspection.warnings]


def _special_tokens(inspection: "Inspection") -> str:
    """The special tokens of a prompt, what puts them there, and a `bos_token` that is not among them."""
    found = inspection.special_tokens
    text = ", ".join(f"{token} ({i})" for token, i in found.items()) or "none"
    if (bos := inspection.bos_token) and bos not in found:
        text += f"; bos_token {bos} is named, and not added"
    return f"{text} ({inspection.special_source})"


def _decoder(config: "DecoderConfig") -> str:
    windows = sorted({window for window in config.windows if window})
    parts = [
        f"{config.num_layers} layers of {config.hidden_size}",
        f"{config.num_heads} heads, {config.num_kv_heads} KV heads of {config.head_dim}",
        f"vocabulary of {config.vocab_size:,}{', tied' if config.tied else ''}",
    ]
    bases = [
        f"{rotary.theta:,.0f}" + (f", {rotary.scaling['rope_type']}" if rotary.scaling else "")
        for rotary in config.rotaries
        if rotary.theta
    ]
    if bases:
        parts.append(f"rotary base {' and '.join(dict.fromkeys(bases))}")
    if windows:
        parts.append(f"windows of {' and '.join(map(str, windows))} in {sum(map(bool, config.windows))} layers")
    return "; ".join(parts)


def _plain(inspection: "Inspection | HeadInspection") -> dict[str, object]:
    from espalier.experiments.planning.inspection import HeadInspection

    if isinstance(inspection, HeadInspection):
        return {**asdict(inspection), "folder": str(inspection.folder), "role": "verifier", "family": "trunk-head"}
    match = inspection.match
    readings = [{"before": before, "token": token} for before, token in inspection.readings]
    ends = [asdict(end) for end in inspection.ends]
    left_out = ("calls", "groups", "products")
    config = {name: value for name, value in asdict(inspection.config).items() if name not in left_out}
    found = {field.name: getattr(inspection, field.name) for field in fields(inspection) if field.name != "match"}
    found |= {"folder": str(inspection.folder), "dtype": _dtype(inspection), "warnings": list(inspection.warnings)}
    found["adapter"] = str(inspection.adapter) if inspection.adapter else None
    found |= {"family": match and match.info.name, "reason": match and match.reason}
    return found | {"config": config, "readings": readings, "ends": ends}


def _why_larger(inspection: "Inspection") -> str:
    """Say what weights take in their files, and why it is less than in memory; empty where it is no less."""
    from espalier.engine.models.options import Quantization

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


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
