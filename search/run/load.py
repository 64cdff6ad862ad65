"""Loads checkpoints by name and creates an orchestrator. Imports torch only when something is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING

from espalier.engine.errors import CheckpointError, nearest
from espalier.engine.models.options import Quantization
from espalier.engine.roles import DRAFT, GENERATOR, VERIFIER
from espalier.prm.scorers import PROBE, SCORERS, SELF, names_checkpoint, names_function
from espalier.search.algorithms.advised import AdvisedSearch, read_advice
from espalier.search.run.settings import (
    DTYPES,
    FLAGS,
    REFERENCE,
    RuntimeSettings,
    check_settings,
    default_cpu_kv_memory,
    model_names,
)

if TYPE_CHECKING:
    import torch

    from espalier.engine.engine import Engine
    from espalier.engine.models.checkpoint import Checkpoint
    from espalier.engine.models.config import DecoderConfig
    from espalier.engine.models.model import Head, Model
    from espalier.prm.families.asked import AskedFamily
    from espalier.prm.scorer import Scorer
    from espalier.prm.scorers.own import ScoreFunction
    from espalier.prm.verifier import Verifier
    from espalier.search.run.generator import Advice, Generator
    from espalier.search.run.orchestrator import Orchestrator

log = logging.getLogger("espalier.engine")


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
    from espalier.prm.scorers.trunk_head import is_trunk_head

    device = _device(settings.device)
    dtype = resolve_dtype(settings.dtype, device.type)
    checkpoints = _open_checkpoints(settings, on_bytes)
    _log_quantizations(checkpoints, settings)
    if device.type == "cpu":
        _require_memory(checkpoints, settings)
    head = checkpoints.pop(VERIFIER) if VERIFIER in checkpoints and is_trunk_head(checkpoints[VERIFIER]) else None
    _require_loadable(settings, checkpoints, head)
    models: dict[str, Model] = {}
    if trunk := checkpoints.get(GENERATOR):
        models[GENERATOR] = replace(
            load_generator(trunk, dtype, device), other_heads=other_heads, wide_heads=frozenset(other_heads)
        )
    scorer = _load_scorer(settings, checkpoints, head, models, own_scorer, dtype, device)
    if DRAFT in checkpoints:
        models[DRAFT] = _load_draft(checkpoints[DRAFT], models[GENERATOR], dtype, device)
    engine = _make_engine(settings, models, device, dtype)
    return engine, trunk and _make_generator(settings, engine, trunk, advised), scorer


def _require_loadable(settings: RuntimeSettings, checkpoints: dict[str, Checkpoint], head: Checkpoint | None) -> None:
    """Raise CheckpointError where configurations tell that a model cannot be loaded, or not for what it is to do."""
    from espalier.prm.families import identify, require_askable

    if not settings.generator and (head or not names_checkpoint(settings.verifier)):
        how = "scores steps as a generator samples them, not given texts"
        how = "is a function, which has no model to load" if names_function(settings.verifier) else how
        raise CheckpointError(f"{settings.verifier} {how}; give a process reward model to --verifier")
    for opened in checkpoints.values():
        _ = opened.decoder_config  # which raises its own
    if VERIFIER in checkpoints:
        identify(checkpoints[VERIFIER], settings.verifier_family, REFERENCE in checkpoints)
    if GENERATOR in checkpoints and settings.verifier == SELF:
        require_askable(checkpoints[GENERATOR], settings.verifier_family)


def _load_scorer(
    settings: RuntimeSettings,
    checkpoints: dict[str, Checkpoint],
    head: Checkpoint | None,
    models: dict[str, Model],
    own_scorer: Scorer | ScoreFunction | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Scorer | None:
    """Load the scorer that the settings name, or take the caller's own; None without either.

    Puts a model that it reads with into `models`, and what it reads of the generator's states into the generator.

    Raises:
        CheckpointError: its checkpoint is incomplete, or nothing of it can be compared with `--verify-incremental`.
    """
    from espalier.prm.families import load_verifier, verifier_of_generator
    from espalier.prm.scorers.own import load_own, scorer_of
    from espalier.prm.scorers.tokens import SCORERS
    from espalier.prm.scorers.trunk_head import add_trunk_head
    from espalier.prm.verifier import Verifier
    from espalier.search.run.probe_scorer import ProbeScorer

    trunk = checkpoints.get(GENERATOR)
    scorer = scorer_of(own_scorer) if own_scorer else None
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
        scorer, models[VERIFIER] = Verifier(family, settings.verify_incremental), family.model
    if scorer and settings.verify_incremental and not scorer.needs.rescored:
        raise CheckpointError(
            f"--verify-incremental: {scorer.name} reads no path step by step, so there is nothing to compare its "
            "scores with; leave the flag out"
        )
    return scorer


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
    from espalier.engine.models.chat.arrangement import system_prompt_of
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
    )
    engine = Engine(models, engine_settings)
    engine.set_threads(settings.threads)
    return engine


def _make_generator(
    settings: RuntimeSettings, engine: Engine, checkpoint: Checkpoint, advised: tuple[AdvisedSearch, ...] | None
) -> Generator:
    from espalier.engine.models.chat.arrangement import system_prompt_of
    from espalier.search.run.generator import Generator, no_template, not_applied
    from espalier.search.thoughts.template_marks import unknown_thoughts

    system_prompt = settings.system_prompt
    if system_prompt is None:
        system_prompt = system_prompt_of(checkpoint)
    defaults = checkpoint.files.optional_json("generation_config.json")
    if warning := not_applied(defaults):
        checkpoint.warn(warning)
    # A bundled generator warns of problems that it was not made for.
    advice: list[Advice] = [each.load() for each in entry_points(group="espalier.advice", name=settings.generator)]
    made = Generator(engine, system_prompt, defaults, *advice[:1], thought_marks=settings.thought_marks)
    if made.marks is None and not settings.thought_marks and (warning := unknown_thoughts(made.model.tokenizer)):
        checkpoint.warn(warning)
    if warning := no_template(made.model.tokenizer):
        checkpoint.warn(warning)
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
    from espalier.prm.families.asked import YesNo
    from espalier.prm.verifier import Verifier

    if not settings.verifier:
        raise CheckpointError("--verifier names no process reward model")
    if settings.verifier == SELF:
        quantization = settings.generator_quantization
        settings = replace(
            settings,
            verifier=settings.generator,
            verifier_family=settings.verifier_family or YesNo.info.name,
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
        try:
            folder, adapter = locate_with_adapter(name, form, hub)
        except CheckpointError as error:
            near = nearest(name, SCORERS) if role == VERIFIER and "did you mean" not in str(error) else ""
            raise CheckpointError(f"{FLAGS[role]}: {error}{near}") from error
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
    from espalier.engine.memory.model_memory import free_memory, model_bytes, require_host_memory
    from espalier.prm.scorers.trunk_head import is_trunk_head

    dtype = resolve_dtype(settings.dtype, settings.device)
    models = {
        FLAGS[role]: model_bytes(checkpoint.decoder_config, dtype, checkpoint.quantization, role != VERIFIER)
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
        hint = nearest(name, ("auto", "cpu", "cuda"))
        raise CheckpointError(f"unknown device {name!r}; --device takes auto, cpu, cuda or cuda:N{hint}") from error
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

    from espalier.engine.memory.model_memory import log, plan_memory

    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        plan = plan_memory(
            total, free, settings.gpu_memory_utilization, models, settings.max_batch_tokens, dtype.itemsize
        )
        log.info("%s", plan)
        return plan.kv_pool
    return default_cpu_kv_memory()


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
        raise CheckpointError(
            f"unknown dtype {name!r}; --dtype takes one of {', '.join(DTYPES)}{nearest(name, DTYPES)}"
        )
    return getattr(torch, name)
