"""From names of checkpoints to a running orchestrator; torch is imported only once something is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from espalier.engine.errors import CheckpointError
from espalier.engine.models.options import LoadFormat, Quantization
from espalier.search.request import GroupingName

if TYPE_CHECKING:
    import torch

    from espalier.engine.models.checkpoint import Checkpoint
    from espalier.search.run.orchestrator import Orchestrator

_REFERENCE = "reference"
"""Beside the roles: the model that an implicit process reward model was trained from."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """What to load, where, and how large.

    Attributes:
        generator: a folder, a hub id `org/name` or `org/name@revision`, or a registered name.
        verifier: the same, or empty for none (a search that reads no scores needs none).
        verifier_family: the name of a family of process reward models, or an adapter file; None goes by the
            checkpoint. See `espalier.prm.families`.
        verifier_reference: the model that an implicit process reward model was trained from, named like the others;
            empty for every other family.
        verify_incremental: compute every score once more from the whole text, and end with an error where it differs:
            a check of the engine and the family, which costs what incremental scoring saves.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        dtype: one of `DTYPES`; `auto` is float32 on CPU and bfloat16 on a GPU.
        kv_memory_bytes: the pool both models share; None takes 4 GiB on a CPU, at most a quarter of its memory, and
            80% of what the weights leave free on a GPU. Memory is only touched as blocks are written.
        block_size: tokens per KV block.
        max_batch_tokens: tokens computed in one engine step at most.
        max_running: searches in flight at most.
        reserved_share: see `EngineSettings`.
        launch_ahead: the same.
        system_prompt: the generator's system message; None takes the checkpoint's own, else one that asks for steps.
        threads: CPU threads; None takes all cores.
        grouping: what tells equal answers from different ones in a vote. math-verify works in processes that are
            spawned when answers come that are not plain numbers: a script needs the usual guard around what it does,
            `if __name__ == "__main__"`.
        grader_memory_bytes: what such a process may take; see `Grader`.
        load_format: which files both models' weights come from.
        generator_quantization: how the generator's weights are kept.
        verifier_quantization: the same of the verifier's.
        offline: take hub ids from the hub's cache and ask nobody.
        cache_dir: where the hub's downloads are kept; None is its client's own place.
    """

    generator: str = "demo-generator"
    verifier: str = "demo-verifier"
    device: str = "auto"
    dtype: str = "auto"
    kv_memory_bytes: int | None = None
    block_size: int = 16
    max_batch_tokens: int = 2048
    max_running: int = 64
    reserved_share: float = 0.25
    launch_ahead: bool = False
    system_prompt: str | None = None
    threads: int | None = None
    grouping: GroupingName = GroupingName.MATH_VERIFY
    grader_memory_bytes: int = 2 * 2**30
    verifier_family: str | None = None
    verifier_reference: str = ""
    verify_incremental: bool = False
    load_format: LoadFormat = LoadFormat.AUTO
    generator_quantization: Quantization = Quantization.NONE
    verifier_quantization: Quantization = Quantization.NONE
    offline: bool = False
    cache_dir: Path | None = None


def load_orchestrator(settings: RuntimeSettings, on_bytes: Callable[[int, int], None] | None = None) -> Orchestrator:
    """Load both models onto one device and put an engine and an orchestrator over them.

    Sets how many threads torch, and what is compiled for CPUs, use in this process.

    Args:
        settings: what to load.
        on_bytes: told how many bytes of the weights are loaded, and of how many, after each tensor.

    Raises:
        CheckpointError: when a checkpoint is missing, unsupported or incomplete, or the device is not there.
    """
    from espalier.engine.engine import Engine, EngineSettings
    from espalier.engine.models.config import parse_decoder_config
    from espalier.engine.models.model import load_generator
    from espalier.engine.scheduling.role_policy import GENERATOR, VERIFIER
    from espalier.prm.families import identify, load_verifier
    from espalier.prm.verifier import Verifier
    from espalier.search.run.generator import STEP_SYSTEM_PROMPT, Generator
    from espalier.search.run.orchestrator import Orchestrator
    from espalier.search.voting.equivalence import make_equivalence

    device = _device(settings.device)
    dtype = _dtype(settings.dtype, device)
    _use_threads(settings.threads, device, dtype)
    checkpoints = _open_checkpoints(settings, on_bytes)
    for opened in checkpoints.values():
        parse_decoder_config(opened.config)
    if VERIFIER in checkpoints:
        identify(checkpoints[VERIFIER], settings.verifier_family, _REFERENCE in checkpoints)
    checkpoint = checkpoints[GENERATOR]
    models = {GENERATOR: load_generator(checkpoint, dtype, device)}
    family = None
    if VERIFIER in checkpoints:
        reference = checkpoints.get(_REFERENCE)
        family = load_verifier(checkpoints[VERIFIER], dtype, device, settings.verifier_family, reference)
        models[VERIFIER] = family.model
    kv_memory = _default_kv_memory(device) if settings.kv_memory_bytes is None else settings.kv_memory_bytes
    engine_settings = EngineSettings(
        kv_memory,
        settings.block_size,
        max_batch_tokens=settings.max_batch_tokens,
        reserved_share=settings.reserved_share,
        launch_ahead=settings.launch_ahead,
    )
    engine = Engine(models, engine_settings)
    system_prompt = settings.system_prompt
    if system_prompt is None:
        system_prompt = checkpoint.config.get("system_prompt", STEP_SYSTEM_PROMPT)
    generator = Generator(engine, system_prompt, checkpoint.optional_json("generation_config.json"))
    verifier = Verifier(engine, family, settings.verify_incremental) if family else None
    equivalence = make_equivalence(settings.grouping, settings.grader_memory_bytes)
    return Orchestrator(engine, generator, verifier, max_running=settings.max_running, equivalence=equivalence)


def _open_checkpoints(settings: RuntimeSettings, on_bytes: Callable[[int, int], None] | None) -> dict[str, Checkpoint]:
    """The checkpoints by role, opened before any is loaded: what is wrong with one is said at once."""
    from espalier.engine.models.checkpoint import Checkpoint
    from espalier.engine.models.hub import HubSettings, locate
    from espalier.engine.scheduling.role_policy import GENERATOR, VERIFIER

    hub = HubSettings(settings.offline, settings.cache_dir)
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if on_bytes:
            on_bytes(done, sum(checkpoint.nbytes for checkpoint in opened.values()))

    wanted = {
        GENERATOR: (settings.generator, settings.generator_quantization),
        VERIFIER: (settings.verifier, settings.verifier_quantization),
        _REFERENCE: (settings.verifier and settings.verifier_reference, settings.verifier_quantization),
    }
    form = settings.load_format
    opened = {
        role: Checkpoint(locate(name, form, hub), form, quantization, count)
        for role, (name, quantization) in wanted.items()
        if name
    }
    return opened


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


def _use_threads(count: int | None, device: torch.device, dtype: torch.dtype) -> None:
    import torch

    if device.type != "cpu" or dtype != torch.float32:
        if count:
            torch.set_num_threads(count)
        return
    from espalier.kernels.cpu.threads import set_threads

    if count:
        set_threads(count)
    # What is worth several threads is compiled and shares them by itself. Idle threads of torch's pool would spin
    # beside it: measured on 2 cores, best-of-16 ran 1.7 times as fast without.
    torch.set_num_threads(1)


def _default_kv_memory(device: torch.device) -> int:
    import torch

    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(0.8 * free)
    return min(4 * 2**30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """What `load_orchestrator` makes of a dtype on a device, both named as in `RuntimeSettings`.

    Raises:
        CheckpointError: for an unknown name, or a device that is not there.
    """
    return _dtype(name, _device(device))


def _dtype(name: str, device: torch.device) -> torch.dtype:
    import torch

    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise CheckpointError(f"unknown dtype {name!r}; --dtype takes one of {', '.join(DTYPES)}")
    return getattr(torch, name)
