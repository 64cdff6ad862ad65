"""What a running search has cost so far."""

import time
from dataclasses import dataclass, field

from espalier.engine.engine import Footprint
from espalier.search.result import Accounting

_NOTHING = Footprint(0, 0, 0)


@dataclass(slots=True)
class Ledger:
    """Counters of one search; see `Accounting` for what each means."""

    submitted: float = field(default_factory=time.monotonic)
    started: float = 0.0
    generator_tokens: int = 0
    generator_tree_tokens: int = 0
    generated_tokens: int = 0
    verifier_tokens: int = 0
    verifier_tree_tokens: int = 0
    nodes: int = 0
    pruned: int = 0
    duplicates: int = 0
    widest: Footprint = field(default=_NOTHING)

    def observe(self, footprint: Footprint) -> None:
        """Remember the widest moment, by physical bytes."""
        if footprint.physical_bytes > self.widest.physical_bytes:
            self.widest = footprint

    def close(self) -> Accounting:
        """The final account."""
        now = time.monotonic()
        return Accounting(
            generator_tokens=self.generator_tokens,
            generator_tree_tokens=self.generator_tree_tokens,
            generated_tokens=self.generated_tokens,
            verifier_tokens=self.verifier_tokens,
            verifier_tree_tokens=self.verifier_tree_tokens,
            nodes=self.nodes,
            pruned=self.pruned,
            duplicates=self.duplicates,
            peak_kv_bytes=self.widest.physical_bytes,
            logical_blocks=self.widest.logical_blocks,
            physical_blocks=self.widest.physical_blocks,
            queue_seconds=(self.started or now) - self.submitted,
            seconds=now - self.started if self.started else 0.0,
        )
