"""Every kernel for GPUs compiled ahead of time, without a GPU: what the compiler makes of it, by architecture.

The compiler and the disassembler come with Triton. A kernel is compiled for the shapes of real models, in bfloat16.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import triton
import typer
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report
from espalier.experiments.planning.roofline import MODELS, ModelShape
from espalier.kernels.triton import (
    attention,
    cache,
    filters,
    linear,
    pointwise,
    recurrent,
    rotation,
    row_linear,
    sampling,
)

ARCHITECTURES = {"sm_80": 80, "sm_86": 86, "sm_89": 89, "sm_90": 90, "sm_100": 100, "sm_120": 120}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_PROCESSOR = {
    "sm_80": {"registers": 65536, "shared": 164 * 1024, "warps": 64},
    "sm_86": {"registers": 65536, "shared": 100 * 1024, "warps": 48},
    "sm_89": {"registers": 65536, "shared": 100 * 1024, "warps": 48},
    "sm_90": {"registers": 65536, "shared": 228 * 1024, "warps": 64},
    "sm_100": {"registers": 65536, "shared": 228 * 1024, "warps": 64},
    "sm_120": {"registers": 65536, "shared": 100 * 1024, "warps": 48},
}
"""Resources of one multiprocessor."""
_ALIGNED = ("slab_stride", "part_stride", "vocabulary")
"""Numbers that are multiples of 16 in every shape."""
_BLOCKS_PER_SLAB, _BLOCK_SIZE = 146, 16


@dataclass(frozen=True)
class Specialisation:
    """A kernel with its constants.

    Attributes:
        kernel: a function decorated by `triton.jit`.
        types: of its arguments, in Triton's words; all pointers are aligned to 16 bytes.
        constants: its constants.
        options: of the compiler.
        multiplies: whether matrix tiles are multiplied, which tensor cores should do.
        moves: whether its time is that of the bytes it moves, which should be loaded 16 at a time.
    """

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)
    multiplies: bool = False
    moves: bool = False


Named = Iterator[tuple[str, Specialisation]]
"""Kernels of one model's shape, by name."""


def specialisations() -> Iterator[tuple[str, str, Specialisation]]:
    """Name of each, the model whose shape it has, and the kernel."""
    small, verifier = "Qwen2.5-1.5B", "Qwen2.5-Math-PRM-7B"
    for model, s in MODELS.items():
        for tile, windowed in ((attention.NARROW, False), (attention.WIDE, False), (attention.WIDE, True)):
            if not windowed or model == "Llama-3.1-8B-PRM":
                yield f"attend_items, {tile.rows} rows{', window' * windowed}", model, _attend(s, tile, windowed)
    yield "attend_items, 64 rows, caps and sinks", small, _attend(MODELS[small], attention.WIDE, True, extras=True)
    large = replace(MODELS[small], config=replace(MODELS[small].config, head_dim=256))
    for tile in attention.tiles_of(256, 256, 2):
        yield f"attend_items, {tile.rows} rows, heads of 256", small, _attend(large, tile, False)
    for model, kernels in ((verifier, _kv), (verifier, _pointwise), (verifier, _products), (small, _sampling)):
        for name, kernel in kernels(MODELS[model]):
            yield name, model, kernel
    for name, kernel in _recurrent():
        yield name, "mamba-2.8b" if name == "scan_channels" else "Qwen3.5-0.8B", kernel


def _kv(s: ModelShape) -> Named:
    """Kernels that write, copy and combine keys and values."""
    bf16, f32, i64 = "*bf16", "*fp32", "*i64"
    for normed in (False, True):
        yield (
            "rotate_and_write" + ", norms" * normed,
            Specialisation(
                cache.rotate_and_write,
                {
                    **dict.fromkeys(("qkv", "query", "keys", "values"), bf16),
                    **(dict.fromkeys(("query_norm", "key_norm"), bf16) if normed else {}),
                    "cosines": f32,
                    "sines": f32,
                    "places": i64,
                    "eps": "fp32",
                },
                {
                    "HEADS": s.config.num_heads,
                    "KV_HEADS": s.config.num_kv_heads,
                    "HEAD_DIM": s.config.head_dim,
                    "PAIRS": s.config.head_dim // 2,
                    "BLOCK_SIZE": _BLOCK_SIZE,
                },
                moves=True,
            ),
        )
    yield (
        "write_tokens",
        Specialisation(
            cache.write_tokens,
            {
                **dict.fromkeys(("key", "value", "keys", "values"), bf16),
                "places": i64,
                **{f"{part}_{of}_stride": "i32" for part in ("key", "value") for of in ("token", "head")},
                "slab_stride": "i64",
            },
            {
                "KV_HEADS": s.config.num_kv_heads,
                "HEAD_DIM": s.config.head_dim,
                "VALUE_DIM": s.config.head_dim,
                "BLOCK_SIZE": _BLOCK_SIZE,
            },
        ),
    )
    yield (
        "rotate_heads",
        Specialisation(
            rotation.rotate_heads,
            {**dict.fromkeys(("x", "cos", "sin", "output"), bf16), "token_stride": "i32", "head_stride": "i32"},
            {"HEADS": s.config.num_heads, "HALF": s.config.head_dim // 2},
        ),
    )
    yield (
        "copy_whole_blocks",
        Specialisation(
            cache.copy_whole_blocks,
            {"pool": bf16, "sources": i64, "destinations": i64, "slab_stride": "i64", "part_stride": "i32"},
            {
                "SLOTS": _BLOCKS_PER_SLAB,
                "SLOT_ELEMENTS": s.config.num_kv_heads * s.config.head_dim * _BLOCK_SIZE,
            },
            moves=True,
        ),
    )


def _pointwise(s: ModelShape) -> Named:
    """Kernels of single elements."""
    bf16, i32, i64 = "*bf16", "*i32", "*i64"
    for adds, normed in ((False, False), (True, False), (True, True)):
        yield (
            "add_and_norm" + ", adding" * adds + " what is normed" * normed,
            Specialisation(
                pointwise.add_and_norm,
                {
                    **dict.fromkeys(("hidden", "weight", "normed"), bf16),
                    **({"added": bf16} if adds else {}),
                    **({"added_weight": bf16} if normed else {}),
                    "eps": "fp32",
                },
                {"SIZE": s.config.hidden_size},
                moves=True,
            ),
        )
    for gelu in (False, True):
        yield (
            "activate_and_multiply" + ", GELU" * gelu,
            Specialisation(
                pointwise.activate_and_multiply,
                {"gate_up": bf16, "output": bf16},
                {"INNER": s.config.intermediate_size, "GELU": gelu},
                moves=True,
            ),
        )
    yield (
        "replace_by_drawn",
        Specialisation(
            pointwise.replace_by_drawn,
            {"token_ids": i32, "drawn": i64, "count": "i32"},
            {},
        ),
    )


def _products(s: ModelShape) -> Named:
    """Products of matrices."""
    bf16, i64 = "*bf16", "*i64"
    c = s.config
    heads, hidden, inner = c.num_heads * c.head_dim, c.hidden_size, c.intermediate_size
    for rows in (row_linear.LEAST_ROWS, row_linear.FEW_ROWS):
        yield f"multiply_rows, {rows}, normed", _multiply(heads + 2 * c.num_kv_heads * c.head_dim, hidden, rows, "norm")
        yield f"multiply_rows, {rows}, normed and gated", _multiply(inner, hidden, rows, "norm", "gate")
        yield f"multiply_rows, {rows}, added", _multiply(hidden, inner, rows, "residual")
    yield "multiply_rows, 64, added, float32", _multiply(hidden, inner, 64, "residual", kind="*fp32")
    yield "multiply_rows, many", _multiply(hidden, inner, 64)
    yield "multiply_rows, 64, normed and gated, float32", _multiply(inner, hidden, 64, "norm", "gate", kind="*fp32")
    yield (
        "grouped_product",
        Specialisation(
            linear.grouped_product,
            {**dict.fromkeys(("x", "weights", "biases", "output"), bf16), "ends": i64},
            {
                "COUNT": 128,
                "OUT": 1536,
                "IN": 2048,
                "TILE_ROWS": linear.TILE_ROWS,
            },
            linear.OPTIONS,
            multiplies=True,
        ),
    )


def _multiply(outputs: int, inputs: int, rows: int, *fused: str, kind: str = "*bf16") -> Specialisation:
    """A product with what is fused: "norm", "gate", "residual"; with nothing, one of many rows by one program each."""
    gated, normed = "gate" in fused, "norm" in fused
    itemsize = 4 if kind == "*fp32" else 2
    parts = row_linear.parts_of(((1 + gated) * outputs, inputs), itemsize, gated)
    return Specialisation(
        row_linear.multiply_rows,
        {
            **dict.fromkeys(("x", "weight", "output"), kind),
            **({"norm": kind, "norm_squares": "*fp32"} if normed else {"bias": kind}),
            **({"squares": "*fp32"} if "residual" in fused else {}),
            **({"partial": "*fp32", "ended": "*i32"} if fused and parts > 1 else {}),
            "eps": "fp32",
            "rows": "i32",
        },
        {"OUT": outputs, "IN": inputs, "PARTS": parts, "TILE_ROWS": rows, "GATED": gated, "GELU": False},
        row_linear.options_of(itemsize, gated),
        multiplies=kind == "*bf16",
        moves=bool(fused),
    )


def _recurrent() -> Named:
    """Kernels of recurrent layers, which the models that are planned with have none of; 64 sequences decode."""
    bf16, f32, i64 = "*bf16", "*fp32", "*i64"
    places = {"memory": f32, "spans": i64, "sources": i64}
    convolution = {"CHANNELS": 6144, "WIDTH": 4, "PORTION": recurrent.CHANNELS}
    yield (
        "convolve_tokens",
        Specialisation(
            recurrent.convolve_tokens,
            {**dict.fromkeys(("x", "weight", "output"), bf16), **places, "stride": "i32", "sequences": "i32"},
            {**convolution, "PADDED": 64, "SILU": True},
        ),
    )
    yield (
        "keep_inputs",
        Specialisation(recurrent.keep_inputs, {"x": bf16, **places, "targets": i64, "stride": "i32"}, convolution),
    )
    for delta in (True, False):
        yield (
            "recur_heads" + ", without delta" * (not delta),
            Specialisation(
                recurrent.recur_heads,
                {
                    **dict.fromkeys(("query", "key", "value", "output"), bf16),
                    **({"beta": bf16} if delta else {}),
                    **places,
                    "log_decay": f32,
                    "targets": i64,
                    **dict.fromkeys(("query_stride", "key_stride", "value_stride"), "i32"),
                },
                {
                    "HEADS": 16,
                    "KEY_HEADS": 16,
                    "ROWS": 128,
                    "COLUMNS": 128,
                    "PORTION": recurrent.COLUMNS,
                    "BY_ROW": False,
                },
            ),
        )
    yield (
        "scan_channels",
        Specialisation(
            recurrent.scan_channels,
            {
                **dict.fromkeys(("x", "dt", "b", "c", "output"), bf16),
                **dict.fromkeys(("a", "d"), f32),
                **places,
                "targets": i64,
            },
            {"CHANNELS": 5120, "SIZE": 16, "PORTION": recurrent.COLUMNS},
        ),
    )


def _attend(s: ModelShape, tile: attention.Tile, windowed: bool, extras: bool = False) -> Specialisation:
    return Specialisation(
        attention.attend_items,
        {
            **dict.fromkeys(("query", "keys", "values", "output"), "*bf16"),
            **dict.fromkeys(("partial", "partial_weights"), "*fp32"),
            **dict.fromkeys(
                ("items", "sizes", "rows", "merge_starts", "merges", "counters", "positions", "tables"), "*i32"
            ),
            "table_stride": "i32",
            "slab_stride": "i64",
            "scale": "fp32",
            **({"window": "i32"} if windowed else {}),
            **({"softcap": "fp32", "sinks": "*bf16"} if extras else {}),
        },
        {
            "SLOTS": _BLOCKS_PER_SLAB,
            "BLOCK_SIZE": _BLOCK_SIZE,
            "KV_HEADS": s.config.num_kv_heads,
            "GROUPS": s.config.num_heads // s.config.num_kv_heads,
            "HEAD_DIM": s.config.head_dim,
            "VALUE_DIM": s.config.head_dim,
            "TILE_ROWS": tile.rows,
        },
        tile.options,
        multiplies=True,
        moves=True,
    )


def _sampling(s: ModelShape) -> Named:
    """Kernels that filter logits and draw from them."""
    bf16, f32, f64, i32, i64 = "*bf16", "*fp32", "*fp64", "*i32", "*i64"
    vocabulary, row = {"vocabulary": "i32"}, {"logits": bf16, "temperatures": f32}
    segments = triton.cdiv(s.config.vocab_size, filters.SEGMENT.value)
    padded = {"PADDED_SEGMENTS": triton.next_power_of_2(segments)}
    measured = {"log_masses": f32, "group_tops": f32, "tops": f32, "best": i32, "masses": i64}
    of_filters = {"top_ks": i64, "top_ps": f32, "min_ps": f32}
    read = {"segment_tops": f32, "masses": i64, "group_tops": f32, "segments": "i32", "groups": "i32"}
    found = {"floors": i64, "counts": i32}
    draw = {
        **row,
        **measured,
        "candidates": bf16,
        "draws": f64,
        **dict.fromkeys(("rows", "token_ids"), i64),
        "log_probabilities": f32,
        "segments": "i32",
    }
    left = {"min_ps": f32, "limits": i64, "counts": i32, "keys": i64}
    for name, kernel, types, constants, moves in (
        (
            "measure_segments",
            sampling.measure_segments,
            {**row, **measured, "candidates": bf16},
            {"GROUP": filters.group_size(s.config.vocab_size)},
            True,
        ),
        ("find_floors", filters.find_floors, {**row, **of_filters, **read, **found}, padded, False),
        (
            "collect_candidates",
            filters.collect_candidates,
            {**row, **read, **found, "candidates": i64},
            {},
            True,
        ),
        (
            "find_limits",
            filters.find_limits,
            {**row, **of_filters, **read, **found, "candidates": i64, "limits": i64},
            padded,
            False,
        ),
        ("draw_rows", sampling.draw_rows, draw, padded, False),
        ("draw_rows, filtered", sampling.draw_rows, {**draw, **left}, padded, False),
    ):
        needed = {argument: kind for argument, kind in (types | vocabulary).items() if argument in kernel.arg_names}
        yield name, Specialisation(kernel, needed, constants, filters.OPTIONS, moves=moves)


def compile_kernel(one: Specialisation, architecture: str) -> dict[str, Any]:
    """Compile and disassemble.

    Returns:
        Registers and bytes of local memory (spills) of a thread, bytes of shared memory and warps of a program, how
        many of a multiprocessor's warps can be in flight, in percent, numbers of instructions (of tensor cores, and
        loads from global memory by their bits), and whether it is launched before the last kernel ends, and waits.
    """
    names = one.kernel.arg_names
    aligned = [name for name, kind in one.types.items() if kind.startswith("*") or name in _ALIGNED]
    constants = one.constants | {"DEPENDENT": ARCHITECTURES[architecture] >= 90}
    source = ASTSource(
        one.kernel,
        signature={name: one.types.get(name, "constexpr") for name in names},
        constexprs={name: constants.get(name) for name in names if name not in one.types},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", ARCHITECTURES[architecture], 32)
    compiled = triton.compile(source, target=target, options=one.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        code = _run("nvdisasm", file.name)
    registers, stack, local = (int(re.findall(rf"\b{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK", "LOCAL"))
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    instructions = re.findall(r"\s(?:@!?U?P\d+ )?([A-Z][A-Z0-9]+(?:\.\w+)*)\s", code)
    loads = [i for i in instructions if i.split(".")[0] in ("LDG", "LDGSTS")]
    widths = [next((bits for bits in (128, 64) if f".{bits}" in i), 32) for i in loads]
    per_processor = _PROCESSOR[architecture]
    programs = min(
        per_processor["registers"] // (-(-registers // 8) * 8 * 32 * warps),
        per_processor["shared"] // (shared + 1024),
        per_processor["warps"] // warps,
        32,
    )
    return {
        "registers": registers,
        "spilled bytes": local + stack,
        "shared bytes": shared,
        "warps": warps,
        "occupancy %": round(100 * programs * warps / per_processor["warps"]),
        "tensor core instructions": sum(i.split(".")[0].endswith("MMA") for i in instructions),
        **{f"loads of {bits} bits": widths.count(bits) for bits in (128, 64, 32)},
        "waits for the kernel before": "griddepcontrol.wait" in compiled.asm["ptx"],
    }


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def run(architectures: Sequence[str] = tuple(ARCHITECTURES)) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A row for each kernel and each of `architectures`, names of `ARCHITECTURES`; no ratios."""
    rows = [
        {
            "kernel": name,
            "model": model,
            "architecture": architecture,
            **compile_kernel(one, architecture),
            "multiplies": one.multiplies,
            "moves": one.moves,
        }
        for name, model, one in specialisations()
        for architecture in architectures
    ]
    return rows, {}


def command(
    architecture: Annotated[
        list[str] | None, typer.Option(help="Only for this architecture, like sm_90; may be repeated.")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Registers, shared memory, occupancy and instructions of each kernel for GPUs; needs triton, and no GPU."""
    if unknown := set(architecture or ()) - ARCHITECTURES.keys():
        raise typer.BadParameter(
            f"{min(unknown)} is not one of {', '.join(ARCHITECTURES)}", param_hint="--architecture"
        )
    Report("kernels for GPUs, compiled", json_path).finish(*run(architecture or tuple(ARCHITECTURES)))
