"""Loads checkpoints by name and creates an orchestrator; imported once something is loaded, as it imports torch."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from types import MappingProxyType

import torch

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.errors import CheckpointError, nearest
from espalier.engine.memory import model_memory
from espalier.engine.memory.model_memory import free_memory, model_bytes, require_host_memory
from espalier.engine.models.chat.turns import system_prompt_of
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.decoder import chosen_quantization
from espalier.engine.models.hub import HubSettings, locate_with_adapter
from espalier.engine.models.load_cache import open_cache
from espalier.engine.models.model import Head, Model, load_generator
from espalier.engine.models.options import Quantization
from espalier.engine.roles import DRAFT, GENERATOR, VERIFIER
from espalier.prm import families, scorers
from espalier.prm.families.asked import AskedFamily, YesNo
from espalier.prm.scorer import Scorer
from espalier.prm.scorers import tokens
from espalier.prm.scorers.own import ScoreFunction, load_own, scorer_of
from espalier.prm.scorers.own_path import HEAD, OwnPathVerifier
from espalier.prm.scorers.trunk_head import add_trunk_head, is_trunk_head
from espalier.prm.verifier import Verifier
from espalier.search.algorithms.advised import read_advice
from espalier.search.run import settings as given
from espalier.search.run.generation_config import not_applied
from espalier.search.run.generator import Advice, Generator, no_template
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.reload import load_weights
from espalier.search.run.settings import REFERENCE, RuntimeSettings
from espalier.search.thoughts.marks import find_marks, unknown_thoughts
from espalier.search.voting.equivalence import make_equivalence

log = logging.getLogger("espalier.engine")

OnBytes = Callable[[int, int], None]
"""Called after each tensor with the bytes of weights loaded so far and the total."""


def with_quantizations(settings: RuntimeSettings) -> RuntimeSettings:
    """The settings with the formats that weights are loaded in instead of `auto`; reads no weights.

    Raises:
        CheckpointError: a checkpoint is missing or unsupported, or the device is not available.
    """
    if all(how is not Quantization.AUTO for _, how in settings.checkpoints.values()):
        return settings
    opened = _Loading(settings).checkpoints
    fields = {role: f"{role}_quantization" for role in (GENERATOR, VERIFIER, DRAFT)}
    chosen = {name: opened[role].quantization for role, name in fields.items() if role in opened}
    return replace(settings, **{name: chosen.get(name, Quantization.NONE) for name in fields.values()})


def open_generator(settings: RuntimeSettings) -> Checkpoint:
    """The generator's checkpoint, of which nothing is loaded.

    Raises:
        CheckpointError: it is missing or unsupported, or the device is not available.
    """
    return _Loading(replace(settings, verifier="", verifier_reference="", draft="")).checkpoints[GENERATOR]


def load_orchestrator(
    settings: RuntimeSettings, on_bytes: OnBytes | None = None, own_scorer: Scorer | ScoreFunction | None = None
) -> Orchestrator:
    """Load both models onto one device and create an engine and an orchestrator for them.

    Also sets this process's thread count for torch and the compiled CPU kernels.

    Args:
        settings: what to load.
        on_bytes: see `OnBytes`.
        own_scorer: the scorer of a caller that names no verifier in `settings`.

    Raises:
        InvalidRequestError: settings are invalid; see `check_settings`.
        CheckpointError: a checkpoint is missing, unsupported or incomplete, or the device is not available.
    """
    engine, generator, scorer = _load(settings, on_bytes, own_scorer=own_scorer)
    assert generator
    own_system_prompt, open_checkpoint = settings.system_prompt is None, partial(_open_in_its_place, settings)
    return Orchestrator(
        engine,
        generator,
        scorer,
        max_running=settings.max_running,
        equivalence=make_equivalence(settings.answer_equivalence, settings.grader_memory),
        model_names=given.model_names(settings),
        expected_tokens=settings.expected_tokens,
        load_weights=partial(load_weights, engine, generator, open_checkpoint, own_system_prompt),
    )


def load_scoring_orchestrator(
    settings: RuntimeSettings, on_bytes: OnBytes | None = None
) -> tuple[Orchestrator, Verifier]:
    """Load the process reward model alone, and create an orchestrator that scores given steps.

    Raises:
        CheckpointError: see `load_verifier_alone`.
    """
    engine, scorer = load_verifier_alone(settings, on_bytes)
    return Orchestrator(engine, None, scorer, settings.max_running), scorer


def load_generator_alone(
    settings: RuntimeSettings,
    on_bytes: OnBytes | None = None,
    other_heads: Mapping[str, Head] = MappingProxyType({}),
) -> tuple[Engine, Generator]:
    """Load the generator, without a verifier, onto an engine of its own; see `load_orchestrator`.

    All of its hidden states are read by `other_heads`; see `Model`.
    """
    engine, generator, _ = _load(replace(settings, verifier=""), on_bytes, other_heads)
    assert generator
    return engine, generator


def load_verifier_alone(settings: RuntimeSettings, on_bytes: OnBytes | None = None) -> tuple[Engine, Verifier]:
    """Load the process reward model, without a generator, onto an engine of its own; see `load_orchestrator`.

    Raises:
        CheckpointError: there is no verifier that scores given texts.
    """
    given.check_settings(settings)
    if not settings.verifier:
        raise CheckpointError("--verifier names no process reward model")
    if settings.verifier == scorers.SELF:
        settings = replace(
            settings,
            verifier=settings.generator,
            verifier_family=settings.verifier_family or YesNo.info.name,
            verifier_quantization=settings.generator_quantization,
        )
    engine, _, scorer = _load(replace(settings, generator=""), on_bytes)
    assert isinstance(scorer, Verifier)
    return engine, scorer


def _load(
    settings: RuntimeSettings,
    on_bytes: OnBytes | None,
    other_heads: Mapping[str, Head] = MappingProxyType({}),
    own_scorer: Scorer | ScoreFunction | None = None,
) -> tuple[Engine, Generator | None, Scorer | None]:
    """Load the models that the settings name; without a generator or a verifier where its name is empty."""
    given.check_settings(settings)
    advised = None if settings.advice is None else read_advice(settings.advice)  # whose faults come before any weight
    loading = _Loading(settings, on_bytes)
    loading.require_loadable()
    if trunk := loading.checkpoints.get(GENERATOR):
        model = load_generator(trunk, loading.dtype, loading.device)
        loading.models[GENERATOR] = replace(model, other_heads=other_heads, wide_heads=frozenset(other_heads))
    scorer = loading.load_scorer(scorer_of(own_scorer) if own_scorer else None)
    if DRAFT in loading.checkpoints:
        loading.load_draft()
    engine = loading.make_engine()
    generator = trunk and _make_generator(settings, engine, trunk)
    if generator and advised is not None:
        generator.defaults = replace(generator.defaults, advised=advised)
    return engine, generator, scorer


class _Loading:
    """One load: the checkpoints that are opened, and the models that are made of them.

    Attributes:
        settings: what to load.
        device: what it is loaded onto.
        dtype: of the weights.
        checkpoints: by role and for `REFERENCE`, opened before any is loaded, so that errors in all are raised first.
        models: those that are loaded, by role.
    """

    def __init__(self, settings: RuntimeSettings, on_bytes: OnBytes | None = None) -> None:
        self.settings = settings
        self.device = _device(settings.device)
        self.dtype = resolve_dtype(settings.dtype, self.device.type)
        self.checkpoints: dict[str, Checkpoint] = {}
        self.models: dict[str, Model] = {}
        hub, done = HubSettings(settings.offline, settings.cache_dir), 0

        def count(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if on_bytes:
                on_bytes(done, sum(checkpoint.nbytes for checkpoint in self.checkpoints.values()))

        form, kept = settings.load_format, open_cache(settings.load_cache)
        for role, (name, quantization) in settings.checkpoints.items():
            try:
                folder, adapter = locate_with_adapter(name, form, hub)
            except CheckpointError as error:
                near = nearest(name, scorers.SCORERS) if role == VERIFIER and "did you mean" not in str(error) else ""
                raise CheckpointError(f"{given.FLAGS[role]}: {error}{near}") from error
            options = settings.batch_invariant, adapter, settings.model_impl, kept
            opened = self.checkpoints[role] = Checkpoint(folder, form, quantization, count, *options)
            if quantization is Quantization.AUTO:
                opened.quantization = self._chosen_quantization(opened)
        if {REFERENCE, VERIFIER} <= self.checkpoints.keys():  # rounding is not to be part of their difference
            self.checkpoints[REFERENCE].quantization = self.checkpoints[VERIFIER].quantization

    def _chosen_quantization(self, checkpoint: Checkpoint) -> Quantization:
        if is_trunk_head(checkpoint):
            return Quantization.NONE
        return chosen_quantization(checkpoint.decoder_config, self.dtype, self.device.type == "cpu")

    def require_loadable(self) -> None:
        """Raise CheckpointError where a model has no room, cannot be loaded, or not for what it is to do."""
        settings, opened = self.settings, self.checkpoints
        for role, (name, quantization) in settings.checkpoints.items():
            if quantization is Quantization.AUTO and (chosen := opened[role].quantization) is not Quantization.NONE:
                weights = opened[role].decoder_config.layer_weights // 1_000_000
                flag = f"--{VERIFIER if role == REFERENCE else role}-quantization"
                what = "%s: %s weights, as its layers have %d million; %s none for float32"
                log.info(what, name, chosen, weights, flag)
        self.require_memory()
        verifier = opened.get(VERIFIER)
        is_head = verifier is not None and is_trunk_head(verifier)
        if not settings.generator and (is_head or not scorers.names_checkpoint(settings.verifier)):
            how = "scores steps as a generator samples them, not given texts"
            how = "is a function, which has no model to load" if scorers.names_function(settings.verifier) else how
            raise CheckpointError(f"{settings.verifier} {how}; give a process reward model to --verifier")
        for role, checkpoint in opened.items():
            if role != VERIFIER or not is_head:
                _ = checkpoint.decoder_config  # which raises its own
        if verifier and not is_head:
            families.identify(verifier, settings.verifier_family, REFERENCE in opened)
        if GENERATOR in opened and settings.verifier == scorers.SELF:
            families.asking(settings.verifier_family).require_askable(opened[GENERATOR])

    def require_memory(self) -> None:
        """Raise CheckpointError if the weights of the opened checkpoints do not fit into the free memory of a CPU."""
        if self.device.type == "cpu":
            models = {
                given.FLAGS[role]: model_bytes(each.decoder_config, self.dtype, each.quantization, role != VERIFIER)
                for role, each in self.checkpoints.items()
                if not is_trunk_head(each)
            }
            require_host_memory(models, free_memory())

    def load_scorer(self, scorer: Scorer | None) -> Scorer | None:
        """Load the scorer that the settings name, or take the caller's own; None without either.

        A model that it reads with becomes one of the `models`, and what it reads of the generator's states part of the
        generator.

        Raises:
            CheckpointError: its checkpoint is incomplete, or nothing of it can be compared with `--verify-incremental`.
        """
        settings, checked = self.settings, self.settings.verify_incremental
        name, checkpoint = settings.verifier, self.checkpoints.get(VERIFIER)
        if GENERATOR in self.models and name == scorers.SELF:
            scorer = self._load_asked()
        elif scorers.names_function(name):
            scorer = load_own(name)
        elif name == scorers.PROBE:
            # A policy's module, which other searches need not load.
            from espalier.search.growth.probes import ProbeScorer

            scorer = ProbeScorer()
        elif name in tokens.SCORERS:
            scorer = tokens.SCORERS[name]
        elif checkpoint and is_trunk_head(checkpoint):
            self.models[GENERATOR], scorer = add_trunk_head(checkpoint, self.models[GENERATOR], checked)
        elif checkpoint:
            reference = self.checkpoints.get(REFERENCE)
            of_family = settings.verifier_family, reference
            family = families.load_verifier(checkpoint, self.dtype, self.device, *of_family)
            scorer, self.models[VERIFIER] = Verifier(family, checked), family.model
        if scorer and checked and not scorer.needs.rescored:
            raise CheckpointError(
                f"--verify-incremental: {scorer.name} reads no path step by step, so there is nothing to compare its "
                "scores with; leave the flag out"
            )
        return scorer

    def _load_asked(self) -> Scorer:
        """The scorer that asks the generator about its steps: on its own paths, where their layout allows."""
        settings, generator, checkpoint = self.settings, self.models[GENERATOR], self.checkpoints[GENERATOR]
        family = families.verifier_of_generator(checkpoint, generator, settings.verifier_family)
        self.models[VERIFIER] = family.model
        if not asks_on_own_paths(family, generator, checkpoint, settings):
            return Verifier(family, settings.verify_incremental)
        self.models[GENERATOR] = replace(generator, other_heads={**generator.other_heads, HEAD: family.model.head})
        return OwnPathVerifier(family, settings.verify_incremental)

    def load_draft(self) -> None:
        """Load the draft model.

        Raises:
            CheckpointError: its tokens are not the generator's, or it has recurrent states.
        """
        checkpoint = self.checkpoints[DRAFT]
        flag = f"--draft {checkpoint.folder}"
        if checkpoint.decoder_config.state_shapes:
            raise CheckpointError(
                f"{flag} has recurrent layers, whose states cannot go back where a draft is not accepted; take a model "
                "without, or tree"
            )
        draft = self.models[DRAFT] = load_generator(checkpoint, self.dtype, self.device)
        mine, other = draft.tokenizer.vocabulary, self.models[GENERATOR].tokenizer.vocabulary
        shared = mine.keys() & other.keys()
        advice = "take a model with the same tokenizer, or tree"
        if differs := sorted(token for token in shared if mine[token] != other[token]):
            tokens = f"{differs[0]!r} is {mine[differs[0]]}, not {other[differs[0]]}"
            raise CheckpointError(f"{flag} has other tokens than the generator: {tokens}; {advice}")
        if len(shared) < 0.9 * len(other):
            raise CheckpointError(f"{flag} has {len(shared)} of the generator's {len(other)} tokens; {advice}")

    def make_engine(self) -> Engine:
        """An engine that runs the models."""
        settings = self.settings
        engine_settings = EngineSettings(
            self._default_kv_memory() if settings.kv_memory is None else settings.kv_memory,
            settings.block_size,
            max_batch_tokens=settings.max_batch_tokens,
            reserved_share=settings.reserved_share,
            launch_ahead=self.device.type == "cuda" if settings.launch_ahead is None else settings.launch_ahead,
            draft_tokens=settings.draft_tokens if settings.draft else 0,
        )
        engine = Engine(self.models, engine_settings)
        engine.set_threads(settings.threads)
        return engine

    def _default_kv_memory(self) -> int:
        if self.device.type != "cuda":
            return given.default_cpu_kv_memory()
        free, total = torch.cuda.mem_get_info(self.device)
        configs = [model.config for model in self.models.values()]
        share, batch_tokens = self.settings.gpu_memory_utilization, self.settings.max_batch_tokens
        plan = model_memory.plan_memory(total, free, share, configs, batch_tokens, self.dtype.itemsize)
        model_memory.log.info("%s", plan)
        return plan.kv_pool


def _make_generator(settings: RuntimeSettings, engine: Engine, checkpoint: Checkpoint) -> Generator:
    defaults = checkpoint.files.optional_json("generation_config.json")
    # A bundled generator warns of problems that it was not made for.
    advice: list[Advice] = [each.load() for each in entry_points(group="espalier.advice", name=settings.generator)]
    prompt = _system_prompt(settings, checkpoint)
    made = Generator(engine, prompt, defaults, *advice[:1], thought_marks=settings.thought_marks)
    knows_thoughts = made.marks is not None or settings.thought_marks
    thoughts = "" if knows_thoughts else unknown_thoughts(made.model.tokenizer)
    for warning in filter(None, (not_applied(defaults), thoughts, no_template(made.model.tokenizer))):
        checkpoint.warn(warning)
    return made


def _system_prompt(settings: RuntimeSettings, checkpoint: Checkpoint) -> str:
    return system_prompt_of(checkpoint) if settings.system_prompt is None else settings.system_prompt


def asks_on_own_paths(family: AskedFamily, generator: Model, checkpoint: Checkpoint, settings: RuntimeSettings) -> bool:
    """Return whether `--verifier self` asks on the generator's own paths, else each is read apart on a second KV.

    Paths with thoughts are read apart: a question about a step would stand within the thought.
    """
    thinks = find_marks(generator.tokenizer, settings.thought_marks)
    return not thinks and family.follows(_system_prompt(settings, checkpoint))


def _open_in_its_place(settings: RuntimeSettings, folder: str) -> Checkpoint:
    """Open a checkpoint as the generator's was, without any that goes with it."""
    alone = replace(settings, generator=folder, verifier="", verifier_reference="", draft="", load_cache="none")
    loading = _Loading(alone)
    loading.require_memory()
    return loading.checkpoints[GENERATOR]


def _device(name: str) -> torch.device:
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


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """Return the dtype that `load_orchestrator` uses for a dtype and a device named as in `RuntimeSettings`.

    Raises:
        CheckpointError: a name is unknown, or the device is not available.
    """
    kind, known = _device(device).type, given.DTYPES
    if name == "auto":
        return torch.float32 if kind == "cpu" else torch.bfloat16
    if name not in known:
        raise CheckpointError(f"unknown dtype {name!r}; --dtype takes one of {', '.join(known)}{nearest(name, known)}")
    return getattr(torch, name)
