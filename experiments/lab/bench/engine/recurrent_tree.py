"""States and tokens of searches over a decoder with recurrent layers, beside `generate` on whole paths."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import ModelImpl
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Generate, Generated, Sampling, stream_key
from espalier.experiments.lab.bench.baselines.vllm_process import VllmProcess, VllmSettings, optional_vllm
from espalier.experiments.lab.bench.engine.model_paths import Generation, clock, write_family
from espalier.experiments.lab.bench.options import JsonPath, VllmPython
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.kernels.cpu.threads import num_threads, set_threads

PATHS, KEPT = 16, 4
"""Candidates of each step, and how many of a beam's go on."""
FAMILY = "qwen3_next"
_SMALL = {"hidden_size": 512, "num_hidden_layers": 4, "vocab_size": 2048, "intermediate_size": 1024}
"""Four layers with the heads of Qwen3.5-0.8B: three states of 1 MiB and their convolutions' last inputs."""


@dataclass
class Counted:
    """Cost of a search.

    Attributes:
        seconds: of one turn; processor time with one thread.
        computed: tokens computed.
        tree: tokens of the tree, each counted once.
        states: held at most.
        copies: of states.
    """

    seconds: float = 0.0
    computed: int = 0
    tree: int = 0
    states: int = 0
    copies: int = 0


def run(
    prompt_tokens: int,
    step_tokens: int,
    steps: int,
    threads: int | None = None,
    show: Show = nothing_shown,
    whole: bool = False,
    vllm_python: str | None = None,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Count a beam search of `steps` steps, 4 of 16 candidates kept after each, and a best-of-16 of paths as long.

    The model is a small one, or if `whole` of the shape of Qwen3.5-0.8B. vLLM takes part if `vllm_python` has it, in
    bfloat16, the only dtype in which it runs such a model on a CPU.

    Returns:
        A row for each, and ratios of its seconds.
    """
    set_threads(threads or num_threads())
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_family(Path(folder), FAMILY, **({} if whole else _SMALL))
        checkpoint = Checkpoint(Path(folder), model_impl=ModelImpl.TRANSFORMERS)
        model = replace(load_generator(checkpoint, torch.float32, "cpu"), eos_token_ids=())
        theirs = Generation(Path(folder))
        random = torch.Generator().manual_seed(0)
        prompt = torch.randint(3, model.config.vocab_size, (prompt_tokens,), generator=random)
        settings = VllmSettings(Path(folder), dtype="bfloat16", max_length=prompt_tokens + steps * step_tokens + 16)
        with optional_vllm(vllm_python, settings) as vllm:
            for name, depth, length in (("beam 4×4", steps, step_tokens), ("best-of-16", 1, steps * step_tokens)):
                _search(model, prompt.tolist(), 1, 2)  # the warm-up
                ours = _search(model, prompt.tolist(), depth, length)
                torch.set_num_threads(num_threads())
                _by_generate(theirs, prompt, 1, 2)
                seconds, computed = _by_generate(theirs, prompt, depth, length)
                torch.set_num_threads(1)
                row: dict[str, Any] = {
                    "search": name,
                    "tokens of the tree": ours.tree,
                    "computed ÷ tree": ours.computed / ours.tree,
                    "states at most": ours.states,
                    "states copied": ours.copies,
                    "MiB of a state": model.config.state_bytes / 2**20,
                    "MiB copied a step": ours.copies * model.config.state_bytes / 2**20 / depth,
                    "seconds": ours.seconds,
                    "by generate, computed ÷ tree": computed / ours.tree,
                    "by generate, seconds": seconds,
                }
                ratios[f"{name}/generate"] = seconds / ours.seconds
                if vllm:
                    _by_vllm(vllm, prompt.tolist(), 1, 2)
                    seconds, computed = _by_vllm(vllm, prompt.tolist(), depth, length)
                    row |= {"by vLLM, computed ÷ tree": computed / ours.tree, "by vLLM, seconds": seconds}
                    ratios[f"{name}/vLLM"] = seconds / ours.seconds
                rows.append(row)
                show(rows, ratios)
    return rows, ratios


def _search(model: Model, prompt: list[int], depth: int, length: int) -> Counted:
    """The search on the engine; the most likely candidates go on."""
    rows = PATHS + KEPT + 2
    tokens = rows * (len(prompt) + depth * length + 16)
    kv_bytes = 2 * (tokens * model.config.kv_bytes_per_token(4) + rows * model.config.state_bytes)
    engine, counted = Engine({GENERATOR: model}, EngineSettings(kv_bytes)), Counted(tree=len(prompt))
    runner, table = engine._runners[GENERATOR], engine.schedulers[GENERATOR].table  # pyright: ignore[reportPrivateUsage]
    launch, states = runner.launch, table.pools[-1]

    def noted(table: Any, plan: Any) -> Any:
        counted.copies += len(plan.copies[table.states][0])
        return launch(table, plan)

    runner.launch = noted
    held, start = [engine.open(GENERATOR, prompt)], clock()
    for step in range(depth):
        for i, sequence in enumerate(held):
            keys = (stream_key(0, "bench", (step, i, k)) for k in range(PATHS // len(held)))
            samplings = tuple(Sampling(key=key) for key in keys)
            engine.submit(Generate("bench", sequence, samplings, length, delimiter="", merge_equal=False))
        candidates: list[Generated] = []
        while engine.busy:
            candidates += [done for done in engine.step() if isinstance(done, Generated)]
            counted.states = max(counted.states, states.live_bytes // model.config.state_bytes)
        counted.tree += sum(each.own_tokens for each in candidates)
        candidates.sort(key=lambda each: -sum(each.log_probabilities))
        _release(engine, [*held, *(each.sequence for each in candidates[KEPT:])])
        held = [each.sequence for each in candidates[:KEPT]]
    counted.seconds = clock() - start
    _release(engine, held)
    counted.computed = engine.stats()[GENERATOR].computed_tokens
    engine.check_drained()
    return counted


def _release(engine: Engine, sequences: list[KVSequence]) -> None:
    for sequence in sequences:
        engine.release(sequence)


def _by_generate(theirs: Generation, prompt: torch.Tensor, depth: int, length: int) -> tuple[float, int]:
    """Seconds and computed tokens of the same search where each step computes the whole path of each candidate."""
    paths, seconds, computed = prompt.expand(PATHS, -1), 0.0, 0
    for _ in range(depth):
        start = clock()
        longer = theirs.longer(paths, length)
        seconds += clock() - start
        computed += longer.numel() - PATHS  # the last tokens are not
        paths = longer[:KEPT].repeat_interleave(PATHS // KEPT, dim=0)
    return seconds, computed


def _by_vllm(vllm: VllmProcess, prompt: list[int], depth: int, length: int) -> tuple[float, int]:
    """Seconds and computed tokens of the same search by vLLM, which may take beginnings of paths from its cache."""
    paths, seconds, computed = [prompt] * PATHS, 0.0, 0
    for _ in range(depth):
        grown, tokens, took = vllm.grow(paths, length)
        seconds, computed = seconds + took, computed + tokens
        paths = [path for path in grown[:KEPT] for _ in range(PATHS // KEPT)]
    return seconds, computed


def command(
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
    shape = ", the shape of Qwen3.5-0.8B" if whole else ""
    title = f"searches with recurrent states, {prompt_tokens} + {steps} x {step_tokens} tokens, float32{shape}"
    report = Report(title, json_path)
    report.finish(*run(prompt_tokens, step_tokens, steps, threads, report.show, whole, vllm_python))
