"""State of an executor and of a server, as `GetServerInfo` reports it, and of a reload that is done."""

from dataclasses import dataclass, field

from espalier.engine.stats import RoleStats


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """Blocks of one model's KV: held by searches, kept for later ones, and free of those that the model holds."""

    live: int
    cached: int
    free: int


@dataclass(frozen=True, slots=True)
class Occupancy:
    """State of an executor at one moment.

    Attributes:
        running: searches that run.
        waiting: searches that wait for memory or a slot.
        kv_blocks: blocks by role; those of all workers where there are several, as each last reported.
        stats: the engine's counters by role; of all workers, those that have ended included.
        pools: KV pools that these are of: one, or as many as there are workers that can be given searches.
    """

    running: int
    waiting: int
    kv_blocks: dict[str, KvBlocks]
    stats: dict[str, RoleStats] = field(default_factory=dict)
    pools: int = 1


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Models, limits and current load of a server.

    Attributes:
        version: of Espalier.
        models: what results depend on besides the request; see `Orchestrator.describe_models`.
        model_names: names of the models by role; empty if the server does not report them.
        kv_memory_bytes: size of the KV pool; of one worker's where there are several.
        occupancy: searches and blocks.
        admitted_calls: calls that hold a slot.
        waiting_calls: calls that wait for one.
        max_searches: slots.
        max_queue: calls that may wait.
    """

    version: str
    models: dict[str, str]
    kv_memory_bytes: int
    occupancy: Occupancy
    admitted_calls: int
    waiting_calls: int
    max_searches: int
    max_queue: int
    model_names: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reloaded:
    """A reload that is done: what is asked from now on is answered by the new weights alone.

    Attributes:
        digest: of the checkpoint that the generator has now.
        digest_before: of the one that it had.
        seconds: that it took.
    """

    digest: str
    digest_before: str
    seconds: float
