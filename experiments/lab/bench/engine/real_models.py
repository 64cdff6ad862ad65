"""Real checkpoints on each path that they have, beside transformers on the same file: texts, logits, memory."""

import dataclasses
import resource
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.models.chat.turns import STEP_SYSTEM_PROMPT
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.hub import locate
from espalier.engine.models.load_cache import LoadCache
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import GGUF, LoadFormat, ModelImpl, Quantization
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Done, Generate, Generated, Sampling, Score, Scored
from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.search.run.generator import render_turns

TEXTS = (
    "The steam engine was improved step by step: Newcomen pumped water, Watt condensed the steam apart.",
    "def quicksort(xs):\n    if len(xs) < 2:\n        return xs\n    pivot = xs[0]\n    return quicksort([x for x in "
    "xs[1:] if x < pivot]) + [pivot] + quicksort([x for x in xs[1:] if x >= pivot])\n",
    "Question: What is the capital of France?\nAnswer: The capital of France is Paris, a city on the Seine.",
    "## Step 1: Find the total\nThere are 12 boxes with 8 pens each, so 12 * 8 = 96 pens.\n\n## Step 2: Subtract\n"
    "96 - 15 = 81.\n\nTherefore, the final answer is: $\\boxed{81}$.",
    "Dear Ms. Alvarez, thank you for your letter of March 3rd. We are sorry to hear that the parcel has not arrived.",
    "La mitocondria produce la mayor parte de la energía química que una célula necesita para vivir.",
    "In May she sold 48 / 2 = 24 clips. Altogether she sold 48 + 24 = 72 clips in April and May.",
)
"""Texts whose logits are compared beside the problem's: int8's loss varies between them by a factor of three."""
PROBLEM = "A baker sold 48 rolls in the morning and half as many in the afternoon. How many rolls did she sell?"
_KV_BYTES = 2**28
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class Reading:
    """A model's reading of a prompt and of some other texts.

    Attributes:
        token_ids: of each text, the prompt first.
        continuation: the most likely tokens after the prompt.
        logits: float32 `[tokens, vocabulary]` of each text.
    """

    token_ids: tuple[tuple[int, ...], ...]
    continuation: tuple[int, ...]
    logits: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Cost of loading a model.

    Attributes:
        seconds: of processor time.
        weight_bytes: of the weights as they stay.
        peak_bytes: the most that the process held beyond what it held before; files mapped into memory count.
        staying_bytes: what of that it still holds.
    """

    seconds: float
    weight_bytes: int
    peak_bytes: int
    staying_bytes: int


def run(
    checkpoints: Sequence[str], new_tokens: int, show: Show = nothing_shown
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Read a prompt with each checkpoint: by native code where there is some and by transformers', float32 and int8.

    Each model is loaded in a process of its own.

    Args:
        checkpoints: folders in Hugging Face layout, or GGUF files.
        new_tokens: how many tokens to decode.
        show: gets the figures that there are so far, whenever there are more.

    Returns:
        A row for each, and ratios of the peak of memory at load over what stays, `peak/NAME PATH WEIGHTS`.
    """
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for name in checkpoints:
        folder = locate(name)
        expected: Reading = _alone(transformers_reading, folder, new_tokens)
        for impl in _impls(folder):
            for quantization in (Quantization.NONE, Quantization.INT8):
                loaded, found = _alone(own_reading, folder, impl, quantization, expected.token_ids, new_tokens)
                rows.append(
                    {
                        "model": folder.name,
                        "path": str(impl),
                        "weights": "float32" if quantization is Quantization.NONE else str(quantization),
                        "same tokens": f"{_agreeing(found, expected)} of {new_tokens}",
                        "cosine of logits": (cosines := _cosines(found, expected))[0],
                        f"mean of {len(cosines)} texts": statistics.fmean(cosines),
                        "load, CPU s": loaded.seconds,
                        "again, CPU s": _second_load(folder, impl, quantization),
                        "weights, MiB": loaded.weight_bytes / 2**20,
                        "peak, MiB": loaded.peak_bytes / 2**20,
                        "stays, MiB": loaded.staying_bytes / 2**20,
                    }
                )
                if loaded.staying_bytes > 0:  # else it found room in memory that the process had already
                    key = f"peak/{folder.name} {impl} {rows[-1]['weights']}"
                    ratios[key] = loaded.peak_bytes / loaded.staying_bytes
                show(rows, ratios)
    return rows, ratios


def transformers_reading(folder: Path, new_tokens: int) -> Reading:
    """Transformers' outputs for the prompt; GGUF files are read by its own tables."""
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    if folder.suffix == GGUF:
        config = transformers.AutoConfig.from_pretrained(folder.parent, gguf_file=folder.name)
        with torch.device("meta"):
            empty = transformers.AutoModelForCausalLM.from_config(config)
        state = load_gguf_checkpoint(str(folder), return_tensors=True, model_to_load=empty)["tensors"]
        model: Any = type(empty).from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)
        del state
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = TextTokenizer(Checkpoint(folder))
    prompt = prompt_ids(tokenizer)
    token_ids = (tuple(prompt), *((prompt[0], *tokenizer.encode(text)) for text in TEXTS))
    with torch.inference_mode():
        logits = tuple(model.eval()(torch.tensor([ids])).logits[0].float().numpy() for ids in token_ids)
        given = torch.tensor([prompt])
        text = model.generate(
            given, do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens, repetition_penalty=1.0
        )
    return Reading(token_ids, tuple(text[0, len(prompt) :].tolist()), logits)


def own_reading(
    folder: Path, impl: ModelImpl, quantization: Quantization, token_ids: tuple[tuple[int, ...], ...], new_tokens: int
) -> tuple[Loaded, Reading]:
    """The engine's outputs for the prompt, and the cost of loading."""
    torch.set_num_threads(1)  # like `load_orchestrator`
    _import_libraries()
    before, start = _start_of_peak(), _cpu_seconds()
    checkpoint = Checkpoint(folder, LoadFormat.AUTO, quantization, model_impl=impl)
    model = dataclasses.replace(load_generator(checkpoint, torch.float32, "cpu"), eos_token_ids=())
    peak, staying = (_memory(field) - before for field in ("VmHWM", "VmRSS"))
    loaded = Loaded(_cpu_seconds() - start, model.weight_bytes, peak, staying)
    return loaded, read(model, token_ids, new_tokens)


def load_seconds(folder: Path, impl: ModelImpl, quantization: Quantization, kept: Path) -> float | None:
    """Processor time of loading with a cache in the folder `kept`; None where such weights are not kept."""
    torch.set_num_threads(1)
    _import_libraries()
    start = _cpu_seconds()
    checkpoint = Checkpoint(folder, LoadFormat.AUTO, quantization, model_impl=impl, load_cache=LoadCache(kept))
    load_generator(checkpoint, torch.float32, "cpu")
    return _cpu_seconds() - start if any(kept.iterdir()) else None


def _second_load(folder: Path, impl: ModelImpl, quantization: Quantization) -> float | None:
    """Processor time of loading weights that an earlier process has kept."""
    with tempfile.TemporaryDirectory() as kept:
        found = [_alone(load_seconds, folder, impl, quantization, Path(kept)) for _ in range(2)]
    return found[1]


def read(model: Model, token_ids: tuple[tuple[int, ...], ...], new_tokens: int) -> Reading:
    """The engine's logits of some texts, and the most likely continuation of the first."""
    engine = Engine({GENERATOR: model}, EngineSettings(kv_memory_bytes=_KV_BYTES))
    sequences = [engine.open(GENERATOR, []) for _ in token_ids]
    logits: list[np.ndarray] = []
    for sequence, ids in zip(sequences, token_ids, strict=True):
        scored = _done(engine, Score("reader", sequence, ids, tuple(range(len(ids)))))
        assert isinstance(scored, Scored)
        logits.append(scored.values)
    text = _done(engine, Generate("writer", sequences[0], (Sampling(temperature=0.0),), new_tokens, delimiter=""))
    assert isinstance(text, Generated)
    return Reading(token_ids, tuple(text.token_ids), tuple(logits))


def _done(engine: Engine, work: Score | Generate) -> Done:
    engine.submit(work)
    while True:
        if done := engine.step():
            return done[0]


def prompt_ids(tokenizer: TextTokenizer) -> list[int]:
    """The problem as a search would ask it."""
    return tokenizer.encode(render_turns(tokenizer, STEP_SYSTEM_PROMPT, PROBLEM).text)


def _impls(folder: Path) -> list[ModelImpl]:
    native = Checkpoint(folder).decoder_config.impl is ModelImpl.NATIVE
    return [ModelImpl.NATIVE, ModelImpl.TRANSFORMERS] if native else [ModelImpl.TRANSFORMERS]


def _alone(function: Any, *args: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def _import_libraries() -> None:
    """Import what loading would, so that its memory is not taken for the weights'."""
    from espalier.engine.models.quantization import quiet_imports

    with quiet_imports():
        import torchao.quantization  # noqa: F401
        import transformers.modeling_gguf_pytorch_utils  # noqa: F401
        from transformers import AutoModelForCausalLM  # noqa: F401

        import espalier.kernels.cpu.backend  # noqa: F401


def _start_of_peak() -> int:
    _CLEAR.write_text("5")  # the peak is what is held now
    return _memory("VmRSS")


def _memory(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _agreeing(found: Reading, expected: Reading) -> int:
    """Number of tokens that both continuations begin with alike."""
    same = [one == other for one, other in zip(found.continuation, expected.continuation, strict=True)]
    return same.index(False) if False in same else len(same)


def _cosines(found: Reading, expected: Reading) -> list[float]:
    """Of the logits of each text, the prompt's first."""
    pairs = zip(found.logits, expected.logits, strict=True)
    doubles = [[torch.from_numpy(each).double().flatten() for each in pair] for pair in pairs]
    return [float(torch.cosine_similarity(*pair, dim=0)) for pair in doubles]


def command(
    checkpoints: Annotated[list[str], typer.Argument(help="Folders in Hugging Face layout, or GGUF files.")],
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode.")] = 48,
    json_path: JsonPath = None,
) -> None:
    """Checkpoints on each path that they have, compared with transformers on the same file: texts, logits, memory."""
    report = Report(f"real models, {new_tokens} tokens, greedy", json_path)
    report.finish(*run(checkpoints, new_tokens, report.show))
