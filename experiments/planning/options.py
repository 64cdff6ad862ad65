"""Options of a plan: the device, and the lengths of a search's paths."""

from dataclasses import dataclass
from typing import ClassVar

from annotated_types import Interval

from espalier.search.schema import option, optional, parse_size


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """A device by its card, or by its sizes."""

    help_panel: ClassVar = "Device"

    card: str | None = optional("a100, h100 or h200; cpu measures this machine.")
    memory: int | None = optional("The device's memory, like 24G.", parse=parse_size)
    bandwidth: float | None = optional("Memory bandwidth, GB/s.", Interval(ge=0.001))
    matrix_rate: float | None = optional("Matrix products in --dtype, TFLOP/s.", Interval(ge=0.001))
    dtype: str = option("auto", "auto is float32 for --card cpu, else bfloat16.")


@dataclass(frozen=True, slots=True)
class LengthOptions:
    """Lengths of the prompts and the paths of a search, in tokens."""

    help_panel: ClassVar = "Problem"

    prompt_tokens: int = option(200, "Tokens of the prompt.", Interval(ge=1))
    steps: int = option(10, "Steps of a path: rounds of the search.", Interval(ge=1, le=128))
    step_tokens: float = option(50, "Tokens of a step.", Interval(ge=1, le=2048))
    verifier_prompt_tokens: int | None = optional("Default: --prompt-tokens.", Interval(ge=1))
    verifier_step_tokens: float | None = optional("Default: --step-tokens.", Interval(ge=1, le=4096))
    merged_share: float = option(0.0, "Share of steps merged with an equal sibling.", Interval(ge=0, le=0.99))
    draft_acceptance: float | None = optional(
        "Share of drafted tokens accepted; default, as measured: 0.91 for a --draft model, 0.24 for tree.",
        Interval(ge=0, le=1),
    )
