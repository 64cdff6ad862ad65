"""Speed of decoders by native code and by transformers' code over the engine, beside transformers alone."""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.hub import locate
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import ModelImpl
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Generate, Sampling, stream_key
from espalier.experiments.cli.options import parse_int_list, parse_list
from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.kernels.cpu.threads import num_threads, set_threads

BATCHES = (1, 4, 16, 64)
SHAPE: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Fields of every family's configuration."""
_EXPERTS: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384}
_QWEN35 = {
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 512},
    "phi3": {"sliding_window": None},
    "qwen3_moe": _EXPERTS,
    "gpt_oss": {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 384},
    "qwen3_5_text": _QWEN35,
    "qwen3_next": _QWEN35
    | {
        "mlp_only_layers": list(range(1, 24)),  # vLLM refuses a model without a mixture of experts
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 896,
        "shared_expert_intermediate_size": 896,
    },
}
"""Configuration of each model type beside, or in place of, `SHAPE`; weights are random."""
LARGE = ("qwen3_5_text", "qwen3_next")
"""Those of a real model's size, which take part where they are named: Qwen3.5-0.8B's, 3 GB."""

Rates = tuple[float, float]
"""Tokens a second: of prompts as they are read, and decoded."""
Contestant = Callable[[torch.Tensor, int], Rates]
"""Takes prompts, int64 `[B, P]`, and the number of new tokens."""


def run(
    families: Sequence[str],
    checkpoints: Sequence[str],
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    batches: Sequence[int] = (),
    threads: int | None = None,
    continuous: bool = False,
    show: Show = nothing_shown,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Measure every family and checkpoint at every batch size.

    Seconds are processor time with one thread, so that a machine's other work counts little, else of the clock.

    Args:
        families: model types of `FAMILIES`.
        checkpoints: folders in Hugging Face layout, to take part as they are.
        prompt_tokens: tokens of each prompt.
        new_tokens: tokens to decode for each sequence.
        repeats: counted repetitions; contestants take turns in each.
        batches: batch sizes; empty for all of `BATCHES`.
        threads: of every contestant; None for all cores.
        continuous: whether transformers' continuous batching takes part.
        show: gets the figures that there are so far, whenever there are more.

    Returns:
        A row for each model and batch, and ratios `decode MODEL@B/NAME` of the transformers path over each other.
    """
    set_threads(threads or num_threads())
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for name in (*families, *checkpoints):
        with _checkpoint(name) as folder:
            contestants = _contestants(folder, continuous)
            for batch in batches or BATCHES:
                random = torch.Generator().manual_seed(batch)
                prompts = torch.randint(3, _vocabulary(folder), (batch, prompt_tokens), generator=random)
                turns = [_turn(contestants, prompts, new_tokens) for _ in range(repeats + 1)][1:]  # after the warm-up
                row: dict[str, Any] = {"model": name if name in FAMILIES else folder.name, "batch": batch}
                for kind, place in (("decode", 1), ("prefill", 0)):
                    rates = {each: [turn[each][place] for turn in turns] for each in contestants}
                    row |= {f"{each}, {kind}": statistics.median(rates[each]) for each in contestants}
                    for each in contestants.keys() - {_PATH}:
                        pairs = zip(rates[_PATH], rates[each], strict=True)
                        ratios[f"{kind} {row['model']}@{batch}/{each}"] = statistics.median(a / b for a, b in pairs)
                rows.append(row)
                show(rows, dict(sorted(ratios.items())))
    return rows, dict(sorted(ratios.items()))


_PATH = "transformers path"


def write_family(folder: Path, model_type: str, **given: Any) -> None:
    """Write a checkpoint of a model type with random weights and the bundled generator's tokenizer.

    Args:
        folder: to write to.
        model_type: of `FAMILIES`.
        given: further fields of its configuration.
    """
    import transformers

    config = transformers.CONFIG_MAPPING[model_type](**{**SHAPE, **FAMILIES[model_type], **given})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((locate("demo-generator") / name).read_bytes())


@contextmanager
def _checkpoint(name: str) -> Iterator[Path]:
    if name not in FAMILIES:
        yield locate(name)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_family(Path(folder), name)
        yield Path(folder)


def _vocabulary(folder: Path) -> int:
    return Checkpoint(folder).decoder_config.vocab_size


def _contestants(folder: Path, continuous: bool) -> dict[str, Contestant]:
    found: dict[str, Contestant] = {_PATH: EngineLoop(folder, ModelImpl.TRANSFORMERS)}
    if Checkpoint(folder).decoder_config.impl is ModelImpl.NATIVE:
        found["native"] = EngineLoop(folder, ModelImpl.NATIVE)
    generate = Generation(folder)
    found["generate"] = generate
    if continuous:
        found["continuous batching"] = generate.continuously
    return found


def _turn(contestants: Mapping[str, Contestant], prompts: torch.Tensor, new_tokens: int) -> dict[str, Rates]:
    rates: dict[str, Rates] = {}
    for name, contestant in contestants.items():
        torch.set_num_threads(1 if isinstance(contestant, EngineLoop) else num_threads())
        rates[name] = contestant(prompts, new_tokens)
    return rates


class EngineLoop:
    """The engine, on one of its paths."""

    def __init__(self, folder: Path, impl: ModelImpl) -> None:
        model = load_generator(Checkpoint(folder, model_impl=impl), torch.float32, "cpu")
        self._model: Model = dataclasses.replace(model, eos_token_ids=())

    def __call__(self, prompts: torch.Tensor, new_tokens: int) -> Rates:
        """See `Contestant`."""
        (batch, length), c = prompts.shape, self._model.config
        blocks = batch * (-(-(length + new_tokens) // 16) + 1)
        kv_bytes = 2 * (blocks * 16 * c.kv_bytes_per_token(4) + (batch + 1) * c.state_bytes)
        settings = EngineSettings(kv_memory_bytes=kv_bytes, max_batch_tokens=batch * length)
        engine = Engine({GENERATOR: self._model}, settings)
        for i, prompt in enumerate(prompts.tolist()):
            sampling = Sampling(key=stream_key(0, "bench", (i,)))
            sequence = engine.open(GENERATOR, prompt)
            engine.submit(Generate(i, sequence, (sampling,), new_tokens, delimiter="", in_place=True))
        start = clock()
        engine.step()  # prompts, and first tokens
        middle = clock()
        while engine.busy:
            engine.step()
        end = clock()
        return batch * length / (middle - start), batch * (new_tokens - 1) / (end - middle)


class Generation:
    """transformers' own `generate`, and its continuous batching, which both sample."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def __call__(self, prompts: torch.Tensor, new_tokens: int) -> Rates:
        """See `Contestant`."""
        (batch, length), times = prompts.shape, _Times()
        start = clock()
        self.longer(prompts, new_tokens, streamer=times)
        _, first, *_, last = times.at  # the prompts come before the first tokens
        return batch * length / (first - start), batch * (new_tokens - 1) / (last - first)

    @torch.inference_mode()
    def longer(self, prompts: torch.Tensor, new_tokens: int, **options: Any) -> torch.Tensor:
        """The prompts, int64 `[B, P]`, with so many sampled tokens behind each; `options` are those of `generate`."""
        return self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
            **options,
        )

    @torch.no_grad()  # it updates in place what it makes outside of inference mode
    def continuously(self, prompts: torch.Tensor, new_tokens: int) -> Rates:
        """See `Contestant`; the time of one new token is the prompts', and is taken off that of all."""
        from transformers import GenerationConfig

        batch, length = prompts.shape
        times = []
        for count in (1, new_tokens):
            config = GenerationConfig(do_sample=True, max_new_tokens=count, eos_token_id=-1, pad_token_id=0)
            start = clock()
            self._model.generate_batch(prompts.tolist(), generation_config=config)
            times.append(clock() - start)
        return batch * length / times[0], batch * (new_tokens - 1) / (times[1] - times[0])


class _Times:
    """A streamer of transformers that notes when tokens come."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.at.append(clock())

    def end(self) -> None:
        pass


def clock() -> float:
    """Seconds: of processor time with one thread, so that a machine's other work counts little, else of the clock."""
    return time.process_time() if num_threads() == 1 else time.perf_counter()


def command(
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
    small = [name for name in FAMILIES if name not in LARGE]
    chosen = small if families is None else parse_list(families or None, "--families")
    if unknown := set(chosen) - FAMILIES.keys():
        raise typer.BadParameter(f"{min(unknown)!r} is not one of {', '.join(FAMILIES)}", param_hint="--families")
    sizes = parse_int_list(batches, "--batches") if batches else ()
    kind = "CPU time of one thread" if threads == 1 else f"{threads or 'all'} threads"
    report = Report(f"paths of models, {prompt_tokens} + {new_tokens} tokens, float32, {kind}", json_path)
    counts = prompt_tokens, new_tokens, repeats
    report.finish(*run(chosen, checkpoints or (), *counts, sizes, threads, continuous, report.show))
