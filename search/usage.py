"""The cost of one search."""

from dataclasses import dataclass

from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.engine.stats import counter, counters

_COMPUTED = "Tokens whose KV the model computed for searches, the prompts' too."
_IN_TREE = "Tokens of the search trees; siblings that share a prefix count it once."
_SAVED = "Further tokens, had every candidate been computed from the prompt on."


@dataclass(slots=True)
class Usage:
    """The cost of one search: a field for each of its counters, see `engine.stats`."""

    generator_tokens: int = counter(_COMPUTED, metric="computed_tokens", role=GENERATOR, span=True)
    generator_tree_tokens: int = counter(_IN_TREE, metric="tree_tokens", role=GENERATOR)
    generator_saved_tokens: int = counter(_SAVED, metric="saved_tokens", role=GENERATOR)
    generated_tokens: int = counter(
        "Tokens that the generator sampled, those of duplicates too, and all of answer probes, written and sampled.",
        metric="sampled_tokens",
        span=True,
    )
    verifier_tokens: int = counter(_COMPUTED, metric="computed_tokens", role=VERIFIER, span=True)
    verifier_tree_tokens: int = counter(_IN_TREE, metric="tree_tokens", role=VERIFIER)
    verifier_saved_tokens: int = counter(_SAVED, metric="saved_tokens", role=VERIFIER)
    nodes: int = counter("Steps sampled.", span=True)
    pruned: int = counter("Steps that the algorithm did not keep.")
    duplicates: int = counter("Steps merged into an equal sibling.")
    peak_kv_bytes: int = counter("Bytes of KV at the search's peak.", span=True)
    generator_peak_kv_bytes: int = counter("Those of the generator.")
    verifier_peak_kv_bytes: int = counter("Those of the verifier.")
    logical_blocks: int = counter("KV blocks at the search's peak, if no two sequences shared any.")
    physical_blocks: int = counter("KV blocks at the search's peak.")
    queue_seconds: float = counter("Time before the search started.", 0.0, span=True)
    first_step_seconds: float = counter("Time from the search's start to its first step.", 0.0, span=True)
    seconds: float = counter("Time from the search's start to its result.", 0.0)
    stopped_paths: int = counter("Paths not run to their end, as the answer was decided.", metric="stopped_paths")
    stopped_tokens: int = counter(
        "Tokens that stopped paths would still have sampled, had they become as long as the mean path that ended.",
        metric="stopped_tokens",
        span=True,
    )
    prompt_tokens: int = counter("Length of the generator's prompt.")
    appended_tokens: int = counter("Tokens that the host wrote into paths.")
    probe_tokens: int = counter(
        "Generated tokens that are answer probes'.", note="{probe_tokens} of the generated tokens are probes'"
    )
    drafted_tokens: int = counter(
        "Tokens proposed for paths and verified, which changes nothing but how long a search takes.",
        column="drafted tokens",
        note="{accepted_tokens} of {drafted_tokens} drafted tokens accepted",
    )
    accepted_tokens: int = counter(
        "Drafted tokens that paths drew, without a step of their own; the others are counted nowhere else.",
        column="accepted %",
        share_of="drafted_tokens",
    )

    @property
    def charged_tokens(self) -> int:
        """Tokens that the search used up: sampled by the generator, those of its probes, and read by the verifier."""
        return self.generated_tokens + self.verifier_tokens


USAGE_COUNTERS = counters(Usage)
"""The counters of a search."""
