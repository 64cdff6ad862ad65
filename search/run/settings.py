"""The models to load, their device and their memory, as a user gives them. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, TypedDict

from annotated_types import Interval

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.engine.models.options import LoadFormat, ModelImpl, Quantization
from espalier.engine.roles import DRAFT, GENERATOR, VERIFIER
from espalier.prm.scorers import SELF, names_checkpoint
from espalier.search.request import AnswerEquivalence
from espalier.search.schema import option, optional, parse_size, violations

TREE = "tree"
"""Drafts of what was said before, without a model."""
REFERENCE = "reference"
"""Besides the roles: the reference model of an implicit process reward model."""
AUTO, NONE = "auto", "none"
_PAIR = {"demo-generator": "demo-verifier", "demo-thinking-generator": "demo-verifier"}
"""Verifiers made for a generator, by the generator's name."""
FLAGS = {GENERATOR: "--generator", VERIFIER: "--verifier", REFERENCE: "--verifier-reference", DRAFT: "--draft"}
"""Flags that name the checkpoints of `RuntimeSettings.checkpoints`."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """Models to load, their device and their memory."""

    help_panel: ClassVar = "Models"
    env_prefix: ClassVar = "ESPALIER_"

    generator: str = option(
        "demo-generator",
        "Folder, Hugging Face id (org/name, org/name@revision), BASE+ADAPTER, demo-generator or "
        "demo-thinking-generator.",
    )
    verifier: str = option(
        AUTO,
        "Process reward model: as --generator, or demo-verifier, or the folder of a trunk head; self asks the "
        "generator whether a step is right; confidence or lowest-confidence reads its probabilities; "
        "probe reads the answer so far, and whether it stays; "
        "MODULE:NAME calls a function of yours with a problem and the steps of a path, or is a Scorer of yours; "
        "none, or '', for none; "
        "auto is demo-verifier with the bundled generators, else none.",
    )
    verifier_family: str | None = optional(
        "Family of the process reward model: a name (see prm/README.md), a family spec (.toml), or the folder that "
        "learn-verifier --trunk made for it. Required for "
        "*ForCausalLM; default: detected from the checkpoint. With --verifier self: yes-no, the default, or judge."
    )
    verifier_reference: str = option("", "eurus-prm: the reference model that the verifier was trained from.")
    verify_incremental: bool = option(
        False, "Compute every score again from the whole text and fail if it differs; slow."
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N.")
    dtype: str = option("auto", "auto, float32, bfloat16 or float16; auto is float32 on a CPU and bfloat16 on a GPU.")
    load_format: LoadFormat = option(
        LoadFormat.AUTO,
        "Weight files to read: auto prefers safetensors over bin; dummy makes random weights, for speed tests.",
    )
    model_impl: ModelImpl = option(
        ModelImpl.AUTO,
        "Code that runs the decoders: native is Espalier's own, for the families that it knows; transformers runs "
        "any that calls its attention interface; auto is native where there is such.",
    )
    generator_quantization: Quantization = option(
        Quantization.AUTO,
        "Quantization of the generator's weights: int8 takes half, int4 about 30% of bfloat16's memory; auto is "
        "int8 for a model with 200 million weights or more in its layers, in float32 on a CPU with AVX-512 VNNI, "
        "which is 2 to 4 times as fast there, else none. int8 is refused on a GPU. int4 needs "
        "espalier-search[quantization].",
    )
    verifier_quantization: Quantization = option(
        Quantization.AUTO, "Quantization of the verifier's weights, as --generator-quantization."
    )
    offline: bool = option(False, "Load Hugging Face ids from the cache only, like HF_HUB_OFFLINE=1.")
    cache_dir: Path | None = optional("Download folder; default: HF_HUB_CACHE, else ~/.cache/huggingface/hub.")
    load_cache: str = option(
        AUTO,
        "Folder that keeps weights once they are int8, on a CPU by native code, so that the next load takes a "
        "fraction of the time; auto is espalier/weights in XDG_CACHE_HOME or ~/.cache, none keeps nothing.",
    )
    kv_memory: int | None = optional(
        "Size of the KV pool shared by both models, like 512M or 4G; default: 4G or a quarter of memory on a "
        "CPU, what --gpu-memory-utilization leaves on a GPU. Pages are used only as blocks are written.",
        parse=parse_size,
    )
    gpu_memory_utilization: float = option(
        0.9,
        "Share of a GPU's memory to use; what the weights and a step leave of it is the KV pool.",
        Interval(gt=0, le=1),
    )
    reserved_share: float = option(
        0.25,
        "Share of a search's worst-case KV memory that is reserved when it starts. With less, more searches run "
        "at once; the last ones are preempted and recomputed when memory runs out. With 1 there is no preemption.",
        Interval(ge=0, le=1),
    )
    expected_tokens: int | None = optional(
        "Tokens of a usual path: a search reserves memory for paths of so many instead of its limit --max-tokens, "
        "so that more run at once. Longer paths may preempt others, or be recomputed. Default: the limit.",
        Interval(ge=1),
    )
    block_size: int = option(16, "Tokens per KV block.", Interval(ge=1, le=1024))
    max_batch_tokens: int = option(2048, "Maximum tokens computed in one engine step.", Interval(ge=1))
    launch_ahead: bool | None = optional(
        "Launch the next batch before processing the results of the last one, to keep a GPU busy; by default on a "
        "GPU. Answers do not change; no gain on a CPU."
    )
    batch_invariant: bool = option(
        False,
        "On a GPU: the same text and scores for a request whatever runs beside it; slower. On a CPU in float32 "
        "this is always so.",
    )
    draft: str = option(
        "",
        "What proposes tokens for paths, several of which one step verifies; results are the same: tree, what was "
        "said before in the prompt and the search's tree; or a smaller model with the generator's tokens, as "
        "--generator; '' for nothing.",
    )
    draft_tokens: int = option(
        8, "Maximum draft of a path; as much as pays is drafted, or nothing.", Interval(ge=1, le=32)
    )
    draft_quantization: Quantization = option(Quantization.NONE, "Quantization of the draft model's weights.")
    system_prompt: str | None = optional(
        "The generator's system prompt; default: the checkpoint's, else one that asks for steps."
    )
    thought_marks: str | None = optional(
        "Marks between which the generator thinks, with a blank between them, like '<think> </think>', or none; "
        "' ... ' between them where they have blanks themselves. Default: found in its chat template and tokens."
    )
    advice: Path | None = optional(
        "File of `espalier advise` for these models, from which --algorithm auto chooses its search."
    )
    threads: int | None = optional("CPU threads; default: all cores.", Interval(ge=1))
    answer_equivalence: AnswerEquivalence = option(
        AnswerEquivalence.MATH_VERIFY,
        "How the vote compares answers; math-verify also finds that \\sqrt{8} equals 2\\sqrt{2}.",
    )
    grader_memory: int = option(
        2 * 2**30,
        "Memory limit of a math-verify process, like 512M; a comparison that needs more counts as unequal.",
        Interval(ge=64 * 2**20),
        parse=parse_size,
    )
    max_running: Annotated[int, Interval(ge=1)] = 64

    def __post_init__(self) -> None:
        if self.verifier == AUTO:
            object.__setattr__(self, "verifier", _PAIR.get(self.generator, ""))
        elif self.verifier == NONE:
            object.__setattr__(self, "verifier", "")

    @property
    def checkpoints(self) -> dict[str, tuple[str, Quantization]]:
        """Names of the checkpoints to load, and the quantization of their weights, by role and for `REFERENCE`."""
        named = {
            GENERATOR: (self.generator, self.generator_quantization),
            VERIFIER: (self.verifier if names_checkpoint(self.verifier) else "", self.verifier_quantization),
            REFERENCE: (self.verifier_reference if self.verifier else "", self.verifier_quantization),
            DRAFT: (self.draft if self.generator and self.draft != TREE else "", self.draft_quantization),
        }
        return {role: (name, quantization) for role, (name, quantization) in named.items() if name}


class SolverSettings(TypedDict, total=False):
    """Keyword arguments of `Solver` that are fields of `RuntimeSettings`; a test holds that they are the same."""

    verifier_family: str | None
    verifier_reference: str
    verify_incremental: bool
    device: str
    dtype: str
    load_format: LoadFormat | str
    model_impl: ModelImpl | str
    generator_quantization: Quantization | str
    verifier_quantization: Quantization | str
    offline: bool
    cache_dir: Path | None
    load_cache: str
    kv_memory: int | str | None
    gpu_memory_utilization: float
    reserved_share: float
    expected_tokens: int | None
    block_size: int
    max_batch_tokens: int
    launch_ahead: bool | None
    batch_invariant: bool
    draft: str
    draft_tokens: int
    draft_quantization: Quantization | str
    system_prompt: str | None
    thought_marks: str | None
    advice: Path | None
    threads: int | None
    answer_equivalence: AnswerEquivalence | str
    grader_memory: int | str
    max_running: int


def check_settings(settings: RuntimeSettings) -> None:
    """Check what can be checked before loading.

    Raises:
        InvalidRequestError: lists the invalid settings.
    """
    wrong = violations(settings)
    if settings.verifier and not names_checkpoint(settings.verifier):
        given = (("verifier_family", settings.verifier_family), ("verifier_reference", settings.verifier_reference))
        rule = f"is not for --verifier {settings.verifier}, which names no checkpoint; leave it out"
        asks = ("verifier_family",) if settings.verifier == SELF else ()
        wrong += [Violation(name, rule) for name, value in given if value and name not in asks]
    # All threads start immediately, each with its own stack: a typo could use up the memory.
    processors = os.cpu_count() or 1
    most = max(64, 4 * processors)
    if settings.threads is not None and settings.threads > most:
        rule = f"must be at most {most} with {processors} processors, is {settings.threads}"
        wrong.append(Violation("threads", rule))
    if wrong:
        raise InvalidRequestError(wrong)


def model_names(settings: RuntimeSettings) -> dict[str, str]:
    """Names of the models by role: as they are given, but of a path its last part, which tells nobody of folders."""
    given = {GENERATOR: settings.generator, VERIFIER: settings.verifier}
    return {role: Path(name).resolve().name if Path(name).exists() else name for role, name in given.items() if name}


def on_gpu(device: str) -> bool:
    """Return whether a device named as in `RuntimeSettings` is a GPU."""
    import torch

    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def default_cpu_kv_memory(processes: int = 1) -> int:
    """Return the default size of a KV pool on a CPU, in bytes, for each of a number of processes."""
    return min(4 * 2**30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (4 * processes))
