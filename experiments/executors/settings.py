"""Options that choose where searches run."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from annotated_types import Interval

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.run.settings import RuntimeSettings
from espalier.search.schema import option, optional, violations


class ExecutorName(StrEnum):
    """Kinds of executor."""

    LOCAL = "local"
    PROCESSES = "processes"
    RAY = "ray"


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """Choice of the executor: in this process, on workers of this machine, or on Ray workers."""

    help_panel: ClassVar = "Executor"
    env_prefix: ClassVar = "ESPALIER_"

    executor: ExecutorName = option(
        ExecutorName.LOCAL,
        "local: in this process. processes: on workers of this machine, each with both models on a GPU or on cores "
        "of its own. ray: on such workers of a Ray cluster.",
    )
    ray_address: str | None = optional(
        "Ray cluster to use: auto for the one of this machine, or HOST:PORT. Default: start one here."
    )
    workers: int = option(
        1,
        "Number of workers; --in-flight, --kv-memory and --threads are of each, and --max-searches of a server is "
        "shared out.",
        Interval(ge=1, le=4096),
    )
    gpus_per_worker: float | None = optional(
        "GPUs of each Ray worker, such as 1 or 0.5. Default: 1 if the cluster has GPUs, unless --device is cpu.",
        Interval(ge=0, le=64),
    )


def check_executor(settings: ExecutorSettings, runtime: RuntimeSettings) -> None:
    """Check what can be checked before workers are started.

    Raises:
        InvalidRequestError: lists the invalid settings.
    """
    wrong = violations(settings)
    if settings.executor is not ExecutorName.RAY:
        of_ray = {"ray_address": settings.ray_address, "gpus_per_worker": settings.gpus_per_worker}
        wrong += [Violation(name, "needs --executor ray") for name, value in of_ray.items() if value is not None]
    if settings.executor is ExecutorName.LOCAL:
        if settings.workers > 1:
            wrong.append(Violation("workers", "needs --executor processes or --executor ray"))
    elif runtime.device.startswith("cuda:"):
        rule = f"must be cuda with --executor {settings.executor}, which assigns GPUs; is {runtime.device}"
        wrong.append(Violation("device", rule))
    if wrong:
        raise InvalidRequestError(wrong)
