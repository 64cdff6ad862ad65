"""Loads checkpoints by name and creates an orchestrator. Imports torch only when something is loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, TypedDict

from annotated_types import Interval

from espalier.engine.errors import CheckpointError, InvalidRequestError, Violation
from espalier.engine.models.options import LoadFormat, ModelImpl, Quantization
from espalier.engine.roles import DRAFT, GENERATOR, VERIFIER
from espalier.prm.scorers import PROBE, SELF, names_checkpoint, names_function
from espalier.search.algorithms.advised import AdvisedSearch, read_advice
from espalier.search.request import AnswerEquivalence
from espalier.search.schema import Option, parse_size, violations

if TYPE_CHECKING:
    import torch

    from espalier.engine.engine import Engine
    from espalier.engine.models.checkpoint import Checkpoint
    from espalier.engine.models.config import DecoderConfig
    from espalier.engine.models.model import Head, Model
    from espalier.prm.asked import AskedFamily
    from espalier.prm.scorer import Scorer
    from espalier.prm.scorers.function import ScoreFunction
    from espalier.prm.verifier import Verifier
    from espalier.search.run.generator import Advice, Generator
    from espalier.search.run.orchestrator import Orchestrator

log = logging.getLogger("espalier.engine")
TREE = "tree"
"""Drafts of what was said before, without a model."""
REFERENCE = "reference"
"""Besides the roles: the reference model of an implicit process reward model."""
AUTO = "auto"
_PAIR = {"demo-generator": "demo-verifier", "demo-thinking-generator": "demo-verifier"}
"""Verifiers made for a generator, by the generator's name."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """Models to load, their device and their memory."""

    help_panel: ClassVar = "Models"
    env_prefix: ClassVar = "ESPALIER_"

    generator: Annotated[
        str,
        Option(
            "Folder, Hugging Face id (org/name, org/name@revision), BASE+ADAPTER, demo-generator or "
            "demo-thinking-generator."
        ),
    ] = "demo-generator"
    verifier: Annotated[
        str,
        Option(
            "Process reward model: as --generator, or demo-verifier, or the folder of a trunk head; self asks the "
            "generator whether a step is right; confidence or lowest-confidence reads its probabilities; "
            "probe reads the answer so far, and whether it stays; "
            "MODULE:NAME calls a function of yours with a problem and the steps of a path, or is a Scorer of yours; "
            "'' for none; "
            "auto is demo-verifier with the bundled generators, else none."
        ),
    ] = AUTO
    verifier_family: Annotated[
        str | None,
        Option(
            "Family of the process reward model: a name (see prm/README.md), a family spec (.toml), or the folder that "
            "learn-verifier --trunk made for it. Required for "
            "*ForCausalLM; default: detected from the checkpoint. With --verifier self: yes-no, the default, or judge."
        ),
    ] = None
    verifier_reference: Annotated[str, Option("eurus-prm: the reference model that the verifier was trained from.")] = (
        ""
    )
    verify_incremental: Annotated[
        bool,
        Option("Compute every score again from the whole text and fail if it differs; slow."),
    ] = False
    device: Annotated[str, Option("auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Annotated[
        str, Option("auto, float32, bfloat16 or float16; auto is float32 on a CPU and bfloat16 on a GPU.")
    ] = "auto"
    load_format: Annotated[
        LoadFormat,
        Option("Weight files to read: auto prefers safetensors over bin; dummy makes random weights, for speed tests."),
    ] = LoadFormat.AUTO
    model_impl: Annotated[
        ModelImpl,
        Option(
            "Code that runs the decoders: native is Espalier's own, for the families that it knows; transformers runs "
            "any that calls its attention interface; auto is native where there is such."
        ),
    ] = ModelImpl.AUTO
    generator_quantization: Annotated[
        Quantization,
        Option(
            "Quantization of the generator's weights: int8 takes half, int4 about 30% of bfloat16's memory; auto is "
            "int8 for a model with 200 million weights or more in its layers, in float32 on a CPU with AVX-512 VNNI, "
            "which is 2 to 4 times as fast there, else none. int4, and int8 on a GPU, need "
            "espalier-search[quantization]."
        ),
    ] = Quantization.AUTO
    verifier_quantization: Annotated[
        Quantization, Option("Quantization of the verifier's weights, as --generator-quantization.")
    ] = Quantization.AUTO
    offline: Annotated[bool, Option("Load Hugging Face ids from the cache only, like HF_HUB_OFFLINE=1.")] = False
    cache_dir: Annotated[
        Path | None, Option("Download folder; default: HF_HUB_CACHE, else ~/.cache/huggingface/hub.")
    ] = None
    load_cache: Annotated[
        str,
        Option(
            "Folder that keeps weights once they are int8, on a CPU by native code, so that the next load takes a "
            "fraction of the time; auto is espalier/weights in XDG_CACHE_HOME or ~/.cache, none keeps nothing."
        ),
    ] = AUTO
    kv_memory: Annotated[
        int | None,
        Option(
            "Size of the KV pool shared by both models, like 512M or 4G; default: 4G or a quarter of memory on a "
            "CPU, what --gpu-memory-utilization leaves on a GPU. Pages are used only as blocks are written.",
            parse=parse_size,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Interval(gt=0, le=1),
        Option("Share of a GPU's memory to use; what the weights and a step leave of it is the KV pool."),
    ] = 0.9
    reserved_share: Annotated[
        float,
        Interval(ge=0, le=1),
        Option(
            "Share of a search's worst-case KV memory that is reserved when it starts. With less, more searches run "
            "at once; the last ones are preempted and recomputed when memory runs out. With 1 there is no preemption."
        ),
    ] = 0.25
    expected_tokens: Annotated[
        int | None,
        Interval(ge=1),
        Option(
            "Tokens of a usual path: a search reserves memory for paths of so many instead of its limit --max-tokens, "
            "so that more run at once. Longer paths may preempt others, or be recomputed. Default: the limit."
        ),
    ] = None
    block_size: Annotated[int, Interval(ge=1, le=1024), Option("Tokens per KV block.")] = 16
    max_batch_tokens: Annotated[int, Interval(ge=1), Option("Maximum tokens computed in one engine step.")] = 2048
    launch_ahead: Annotated[
        bool | None,
        Option(
            "Launch the next batch before processing the results of the last one, to keep a GPU busy; by default on a "
            "GPU. Answers do not change; no gain on a CPU."
        ),
    ] = None
    batch_invariant: Annotated[
        bool,
        Option(
            "On a GPU: the same text and scores for a request whatever runs beside it; slower. On a CPU in float32 "
            "this is always so."
        ),
    ] = False
    draft: Annotated[
        str,
        Option(
            "What proposes tokens for paths, several of which one step verifies; results are the same: tree, what was "
            "said before in the prompt and the search's tree; or a smaller model with the generator's tokens, as "
            "--generator; '' for nothing."
        ),
    ] = ""
    draft_tokens: Annotated[
        int, Interval(ge=1, le=32), Option("Maximum draft of a path; as much as pays is drafted, or nothing.")
    ] = 8
    draft_quantization: Annotated[Quantization, Option("Quantization of the draft model's weights.")] = (
        Quantization.NONE
    )
    run_ahead: Annotated[
        int,
        Interval(ge=0, le=1024),
        Option(
            "beam, dvts: a step of fewer tokens than this is filled up with the next steps of paths that are likely to "
            "be kept; those of others are dropped. Results are the same. 0 for none."
        ),
    ] = 0
    system_prompt: Annotated[
        str | None,
        Option("The generator's system prompt; default: the checkpoint's, else one that asks for steps."),
    ] = None
    thought_marks: Annotated[
        str | None,
        Option(
            "Marks between which the generator thinks, with a blank between them, like '<think> </think>', or none; "
            "default: found in its chat template and its tokens."
        ),
    ] = None
    advice: Annotated[
        Path | None,
        Option("File of `espalier advise` for these models, from which --algorithm auto chooses its search."),
    ] = None
    threads: Annotated[int | None, Interval(ge=1), Option("CPU threads; default: all cores.")] = None
    answer_equivalence: Annotated[
        AnswerEquivalence,
        Option("How the vote compares answers; math-verify also finds that \\sqrt{8} equals 2\\sqrt{2}."),
    ] = AnswerEquivalence.MATH_VERIFY
    grader_memory: Annotated[
        int,
        Interval(ge=64 * 2**20),  # below about 16 MiB sympy cannot parse any answer
        Option(
            "Memory limit of a math-verify process, like 512M; a comparison that needs more counts as unequal.",
            parse=parse_size,
        ),
    ] = 2 * 2**30
    max_running: Annotated[int, Interval(ge=1)] = 64

    def __post_init__(self) -> None:
        if self.verifier == AUTO:
            object.__setattr__(self, "verifier", _PAIR.get(self.generator, ""))

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


def with_quantizations(settings: RuntimeSettings) -> RuntimeSettings:
    """The settings with the formats that weights are loaded in instead of `auto`; reads no weights.

    Raises:
        CheckpointError: a checkpoint is missing or unsupported, or the device is not available.
    """
    if all(how is not Quantization.AUTO for _, how in settings.checkpoints.values()):
        return settings
    opened = _open_checkpoints(settings, None)
    fields = {role: f"{role}_quantization" for role in (GENERATOR, VERIFIER, DRAFT)}
    chosen = {name: opened[role].quantization for role, name in fields.items() if role in opened}
    return replace(settings, **{name: chosen.get(name, Quantization.NONE) for name in fields.values()})


def open_generator(settings: RuntimeSettings) -> Checkpoint:
    """The generator's checkpoint, of which nothing is loaded.

    Raises:
        CheckpointError: it is missing or unsupported, or the device is not available.
    """
    return _open_checkpoints(replace(settings, verifier="", verifier_reference="", draft=""), None)[GENERATOR]


class SolverSettings(TypedDict, total=False):
    """Keyword arguments of `Solver` that are fields of `RuntimeSettings`; a test holds that they are the same."""

    verifier_family: str | None
    verifier_reference: str
    verify_incremental: bool
    load_format: LoadFormat | str
    model_impl: ModelImpl | str
    generator_quantization: Quantization | str
    verifier_quantization: Quantization | str
    offline: bool
    cache_dir: Path | None
    load_cache: str
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
    run_ahead: int
    system_prompt: str | None
    thought_marks: str | None
    advice: Path | None
    threads: int | None
    answer_equivalence: AnswerEquivalence | str
    grader_memory: int | str


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


def _load(
    settings: RuntimeSettings,
    on_bytes: Callable[[int, int], None] | None = None,
    other_heads: Mapping[str, Head] = MappingProxyType({}),
    own_scorer: Scorer | ScoreFunction | None = None,
) -> tuple[Engine, Generator | None, Scorer | None]:
    """Load the models that the settings name; without a generator or a verifier where its name is empty.

    Args:
        settings: what to load.
        on_bytes: see `load_orchestrator`.
        other_heads: heads that all of the generator's hidden states are read by; see `Model`.
        own_scorer: see `load_orchestrator`.
    """
    check_settings(settings)
    advised = None if settings.advice is None else read_advice(settings.advice)  # whose faults come before any weight
    from espalier.engine.models.model import load_generator
    from espalier.prm.families import identify, load_verifier, require_askable, verifier_of_generator
    from espalier.prm.scorers.confidence import SCORERS
    from espalier.prm.scorers.own import load_own, scorer_of
    from espalier.prm.scorers.trunk_head import add_trunk_head, is_trunk_head
    from espalier.prm.verifier import Verifier
    from espalier.search.run.probe_scorer import ProbeScorer

    device = _device(settings.device)
    dtype = resolve_dtype(settings.dtype, device.type)
    checkpoints = _open_checkpoints(settings, on_bytes)
    _log_quantizations(checkpoints, settings)
    if device.type == "cpu":
        _require_memory(checkpoints, settings)
    head = checkpoints.pop(VERIFIER) if VERIFIER in checkpoints and is_trunk_head(checkpoints[VERIFIER]) else None
    if not settings.generator and (head or not names_checkpoint(settings.verifier)):
        how = "scores steps as a generator samples them, not given texts"
        how = "is a function, which has no model to load" if names_function(settings.verifier) else how
        raise CheckpointError(f"{settings.verifier} {how}; give a process reward model to --verifier")
    for opened in checkpoints.values():
        _ = opened.decoder_config  # whose faults are found before anything is loaded
    if VERIFIER in checkpoints:
        identify(checkpoints[VERIFIER], settings.verifier_family, REFERENCE in checkpoints)
    if GENERATOR in checkpoints and settings.verifier == SELF:
        require_askable(checkpoints[GENERATOR], settings.verifier_family)
    models: dict[str, Model] = {}
    if trunk := checkpoints.get(GENERATOR):
        models[GENERATOR] = replace(
            load_generator(trunk, dtype, device), other_heads=other_heads, wide_heads=frozenset(other_heads)
        )
    family, scorer = None, scorer_of(own_scorer) if own_scorer else None
    if trunk and settings.verifier == SELF:
        asked = verifier_of_generator(trunk, models[GENERATOR], settings.verifier_family)
        models[GENERATOR], scorer = _asked_itself(asked, models[GENERATOR], trunk, settings)
        models[VERIFIER] = asked.model
    elif settings.verifier and not names_checkpoint(settings.verifier):
        by_name = {**SCORERS, PROBE: ProbeScorer()}
        scorer = load_own(settings.verifier) if names_function(settings.verifier) else by_name[settings.verifier]
    elif head:
        models[GENERATOR], scorer = add_trunk_head(head, models[GENERATOR], settings.verify_incremental)
    elif VERIFIER in checkpoints:
        reference = checkpoints.get(REFERENCE)
        family = load_verifier(checkpoints[VERIFIER], dtype, device, settings.verifier_family, reference)
    if family:
        scorer, models[VERIFIER] = Verifier(family, settings.verify_incremental), family.model
    if DRAFT in checkpoints:
        models[DRAFT] = _load_draft(checkpoints[DRAFT], models[GENERATOR], dtype, device)
    if scorer and settings.verify_incremental and not scorer.rescored:
        raise CheckpointError(
            f"--verify-incremental: {scorer.name} reads no path step by step, so there is nothing to compare its "
            "scores with; leave the flag out"
        )
    engine = _make_engine(settings, models, device, dtype)
    return engine, trunk and _make_generator(settings, engine, trunk, advised), scorer


def _asked_itself(
    family: AskedFamily, generator: Model, checkpoint: Checkpoint, settings: RuntimeSettings
) -> tuple[Model, Verifier]:
    """The generator, and the scorer that asks it about its steps: on its own paths, where their layout allows."""
    from espalier.prm.scorers.own_path import HEAD, OwnPathVerifier
    from espalier.prm.verifier import Verifier

    if not asks_on_own_paths(family, generator, checkpoint, settings):
        return generator, Verifier(family, settings.verify_incremental)
    heads = {**generator.other_heads, HEAD: family.model.head}
    return replace(generator, other_heads=heads), OwnPathVerifier(family, settings.verify_incremental)


def asks_on_own_paths(family: AskedFamily, generator: Model, checkpoint: Checkpoint, settings: RuntimeSettings) -> bool:
    """Return whether `--verifier self` asks on the generator's own paths, else each is read apart on a second KV.

    Paths with thoughts are read apart: a question about a step would stand within the thought.
    """
    from espalier.engine.models.chat.system_prompt import system_prompt_of
    from espalier.search.thoughts.marks import find_marks

    system_prompt = system_prompt_of(checkpoint) if settings.system_prompt is None else settings.system_prompt
    return not find_marks(generator.tokenizer, settings.thought_marks) and family.follows(system_prompt)


def _load_draft(checkpoint: Checkpoint, generator: Model, dtype: torch.dtype, device: torch.device) -> Model:
    """Load a draft model.

    Raises:
        CheckpointError: its tokens are not the generator's, or it has recurrent states.
    """
    from espalier.engine.models.model import load_generator

    if checkpoint.decoder_config.state_shapes:
        raise CheckpointError(
            f"--draft {checkpoint.folder} has recurrent layers, whose states cannot go back where a draft is not "
            "accepted; take a model without, or tree"
        )
    draft = load_generator(checkpoint, dtype, device)
    mine, other = draft.tokenizer.vocabulary, generator.tokenizer.vocabulary
    if differs := sorted(token for token in mine.keys() & other.keys() if mine[token] != other[token]):
        raise CheckpointError(
            f"--draft {checkpoint.folder} has other tokens than the generator: {differs[0]!r} is "
            f"{mine[differs[0]]}, not {other[differs[0]]}; take a model with the same tokenizer, or tree"
        )
    if len(mine.keys() & other.keys()) < 0.9 * len(other):
        raise CheckpointError(
            f"--draft {checkpoint.folder} has {len(mine.keys() & other.keys())} of the generator's {len(other)} "
            "tokens; take a model with the same tokenizer, or tree"
        )
    return draft


def load_orchestrator(
    settings: RuntimeSettings,
    on_bytes: Callable[[int, int], None] | None = None,
    own_scorer: Scorer | ScoreFunction | None = None,
) -> Orchestrator:
    """Load both models onto one device and create an engine and an orchestrator for them.

    Also sets this process's thread count for torch and the compiled CPU kernels.

    Args:
        settings: what to load.
        on_bytes: called after each tensor with the bytes of weights loaded so far and the total.
        own_scorer: the scorer of a caller that names no verifier in `settings`.

    Raises:
        InvalidRequestError: settings are invalid; see `check_settings`.
        CheckpointError: a checkpoint is missing, unsupported or incomplete, or the device is not available.
    """
    engine, generator, scorer = _load(settings, on_bytes, own_scorer=own_scorer)
    from espalier.search.run.orchestrator import Orchestrator
    from espalier.search.run.reload import load_weights
    from espalier.search.voting.equivalence import make_equivalence

    assert generator
    return Orchestrator(
        engine,
        generator,
        scorer,
        max_running=settings.max_running,
        equivalence=make_equivalence(settings.answer_equivalence, settings.grader_memory),
        model_names=model_names(settings),
        expected_tokens=settings.expected_tokens,
        load_weights=partial(
            load_weights, engine, generator, partial(_open_in_its_place, settings), settings.system_prompt is None
        ),
    )


def load_scoring_orchestrator(
    settings: RuntimeSettings, on_bytes: Callable[[int, int], None] | None = None
) -> tuple[Orchestrator, Verifier]:
    """Load the process reward model alone, and create an orchestrator that scores given steps.

    Raises:
        CheckpointError: see `load_verifier_alone`.
    """
    engine, scorer = load_verifier_alone(settings, on_bytes)
    from espalier.search.run.orchestrator import Orchestrator

    return Orchestrator(engine, None, scorer, settings.max_running), scorer


def model_names(settings: RuntimeSettings) -> dict[str, str]:
    """Names of the models by role: as they are given, but of a path its last part, which tells nobody of folders."""
    given = {GENERATOR: settings.generator, VERIFIER: settings.verifier}
    return {role: Path(name).resolve().name if Path(name).exists() else name for role, name in given.items() if name}


def load_generator_alone(
    settings: RuntimeSettings,
    on_bytes: Callable[[int, int], None] | None = None,
    other_heads: Mapping[str, Head] = MappingProxyType({}),
) -> tuple[Engine, Generator]:
    """Load the generator, without a verifier, onto an engine of its own; see `load_orchestrator`."""
    engine, generator, _ = _load(replace(settings, verifier=""), on_bytes, other_heads)
    assert generator
    return engine, generator


def _make_engine(
    settings: RuntimeSettings, models: dict[str, Model], device: torch.device, dtype: torch.dtype
) -> Engine:
    from espalier.engine.engine import Engine, EngineSettings

    kv_memory = settings.kv_memory
    if kv_memory is None:
        kv_memory = _default_kv_memory(settings, device, dtype, [model.config for model in models.values()])
    engine_settings = EngineSettings(
        kv_memory,
        settings.block_size,
        max_batch_tokens=settings.max_batch_tokens,
        reserved_share=settings.reserved_share,
        launch_ahead=device.type == "cuda" if settings.launch_ahead is None else settings.launch_ahead,
        draft_tokens=settings.draft_tokens if settings.draft else 0,
        run_ahead=settings.run_ahead,
    )
    engine = Engine(models, engine_settings)
    engine.set_threads(settings.threads)
    return engine


def _make_generator(
    settings: RuntimeSettings, engine: Engine, checkpoint: Checkpoint, advised: tuple[AdvisedSearch, ...] | None
) -> Generator:
    from espalier.engine.models.chat.system_prompt import system_prompt_of
    from espalier.search.run.generator import Generator

    system_prompt = settings.system_prompt
    if system_prompt is None:
        system_prompt = system_prompt_of(checkpoint)
    defaults = checkpoint.optional_json("generation_config.json")
    # A bundled generator warns of problems that it was not made for.
    advice: list[Advice] = [each.load() for each in entry_points(group="espalier.advice", name=settings.generator)]
    made = Generator(engine, system_prompt, defaults, *advice[:1], thought_marks=settings.thought_marks)
    if advised is not None:
        made.defaults = replace(made.defaults, advised=advised)
    return made


def load_verifier_alone(
    settings: RuntimeSettings, on_bytes: Callable[[int, int], None] | None = None
) -> tuple[Engine, Verifier]:
    """Load the process reward model, without a generator, onto an engine of its own; see `load_orchestrator`.

    Raises:
        CheckpointError: there is no verifier that scores given texts.
    """
    check_settings(settings)
    from espalier.prm.families.yes_no import INFO as YES_NO
    from espalier.prm.verifier import Verifier

    if not settings.verifier:
        raise CheckpointError("--verifier names no process reward model")
    if settings.verifier == SELF:
        quantization = settings.generator_quantization
        settings = replace(
            settings,
            verifier=settings.generator,
            verifier_family=settings.verifier_family or YES_NO.name,
            verifier_quantization=quantization,
        )
    engine, _, scorer = _load(replace(settings, generator=""), on_bytes)
    assert isinstance(scorer, Verifier)
    return engine, scorer


def _open_in_its_place(settings: RuntimeSettings, folder: str) -> Checkpoint:
    """Open a checkpoint as the generator's was, without any that goes with it."""
    alone = replace(settings, generator=folder, verifier="", verifier_reference="", draft="", load_cache="none")
    opened = _open_checkpoints(alone, None)
    if _device(settings.device).type == "cpu":
        _require_memory(opened, settings)
    return opened[GENERATOR]


def _open_checkpoints(settings: RuntimeSettings, on_bytes: Callable[[int, int], None] | None) -> dict[str, Checkpoint]:
    """Open the checkpoints by role before loading any, so that errors in either are raised at once."""
    from espalier.engine.models.checkpoint import Checkpoint
    from espalier.engine.models.hub import HubSettings, locate_with_adapter
    from espalier.engine.models.load_cache import open_cache

    hub = HubSettings(settings.offline, settings.cache_dir)
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if on_bytes:
            on_bytes(done, sum(checkpoint.nbytes for checkpoint in opened.values()))

    form, kept = settings.load_format, open_cache(settings.load_cache)
    opened = dict[str, Checkpoint]()
    for role, (name, quantization) in settings.checkpoints.items():
        folder, adapter = locate_with_adapter(name, form, hub)
        options = settings.batch_invariant, adapter, settings.model_impl, kept
        opened[role] = Checkpoint(folder, form, quantization, count, *options)
        if quantization is Quantization.AUTO:
            opened[role].quantization = _chosen_quantization(opened[role], settings)
    if REFERENCE in opened and VERIFIER in opened:
        opened[REFERENCE].quantization = opened[VERIFIER].quantization  # rounding is not to be part of their difference
    return opened


def _chosen_quantization(checkpoint: Checkpoint, settings: RuntimeSettings) -> Quantization:
    from espalier.engine.models.decoder import chosen_quantization
    from espalier.prm.scorers.trunk_head import is_trunk_head

    if is_trunk_head(checkpoint):
        return Quantization.NONE
    device = _device(settings.device)
    return chosen_quantization(
        checkpoint.decoder_config, resolve_dtype(settings.dtype, device.type), device.type == "cpu"
    )


def _log_quantizations(opened: dict[str, Checkpoint], settings: RuntimeSettings) -> None:
    """Log the weights that are quantised because of `auto`."""
    for role, (name, given) in settings.checkpoints.items():
        if given is Quantization.AUTO and (chosen := opened[role].quantization) is not Quantization.NONE:
            weights = opened[role].decoder_config.layer_weights // 1_000_000
            flag = f"--{VERIFIER if role == REFERENCE else role}-quantization"
            log.info("%s: %s weights, as its layers have %d million; %s none for float32", name, chosen, weights, flag)


def _require_memory(opened: dict[str, Checkpoint], settings: RuntimeSettings) -> None:
    """Raise CheckpointError if the weights of the opened checkpoints do not fit into the free memory."""
    from espalier.engine.memory.host_memory import free_memory, model_bytes, require_host_memory
    from espalier.prm.scorers.trunk_head import is_trunk_head

    dtype = resolve_dtype(settings.dtype, settings.device)
    flags = {GENERATOR: "--generator", VERIFIER: "--verifier", REFERENCE: "--verifier-reference", DRAFT: "--draft"}
    models = {
        flags[role]: model_bytes(checkpoint.decoder_config, dtype, checkpoint.quantization, role != VERIFIER)
        for role, checkpoint in opened.items()
        if not is_trunk_head(checkpoint)
    }
    require_host_memory(models, free_memory())


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CheckpointError(f"unknown device {name!r}; --device takes auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise CheckpointError(f"--device {name} is not supported; --device takes auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CheckpointError(f"--device {name}: no CUDA device is available")
    return device


def on_gpu(device: str) -> bool:
    """Return whether a device named as in `RuntimeSettings` is a GPU."""
    import torch

    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def _default_kv_memory(
    settings: RuntimeSettings, device: torch.device, dtype: torch.dtype, models: list[DecoderConfig]
) -> int:
    import torch

    from espalier.engine.memory.device_memory import log, plan_memory

    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        plan = plan_memory(
            total, free, settings.gpu_memory_utilization, models, settings.max_batch_tokens, dtype.itemsize
        )
        log.info("%s", plan)
        return plan.kv_pool
    return default_cpu_kv_memory()


def default_cpu_kv_memory(processes: int = 1) -> int:
    """Return the default size of a KV pool on a CPU, in bytes, for each of a number of processes."""
    return min(4 * 2**30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (4 * processes))


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """Return the dtype that `load_orchestrator` uses for a dtype and a device named as in `RuntimeSettings`.

    Raises:
        CheckpointError: a name is unknown, or the device is not available.
    """
    import torch

    kind = _device(device).type
    if name == "auto":
        return torch.float32 if kind == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise CheckpointError(f"unknown dtype {name!r}; --dtype takes one of {', '.join(DTYPES)}")
    return getattr(torch, name)
