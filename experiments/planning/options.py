"""Options of a plan: the device, and the lengths of a search's paths."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Interval

from espalier.search.schema import Option, parse_size


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """A device by its card, or by its sizes."""

    help_panel: ClassVar = "Device"

    card: Annotated[str | None, Option("a100, h100 or h200; cpu measures this machine.")] = None
    memory: Annotated[int | None, Option("The device's memory, like 24G.", parse=parse_size)] = None
    bandwidth: Annotated[float | None, Interval(ge=0.001), Option("Memory bandwidth, GB/s.")] = None
    matrix_rate: Annotated[float | None, Interval(ge=0.001), Option("Matrix products in --dtype, TFLOP/s.")] = None
    dtype: Annotated[str, Option("auto is float32 for --card cpu, else bfloat16.")] = "auto"


@dataclass(frozen=True, slots=True)
class LengthOptions:
    """Lengths of the prompts and the paths of a search, in tokens."""

    help_panel: ClassVar = "Problem"

    prompt_tokens: Annotated[int, Interval(ge=1), Option("Tokens of the prompt.")] = 200
    steps: Annotated[int, Interval(ge=1, le=128), Option("Steps of a path: rounds of the search.")] = 10
    step_tokens: Annotated[float, Interval(ge=1, le=2048), Option("Tokens of a step.")] = 50
    verifier_prompt_tokens: Annotated[int | None, Interval(ge=1), Option("Default: --prompt-tokens.")] = None
    verifier_step_tokens: Annotated[
        float | None, Interval(ge=1, le=4096), Option("With separators; default: --step-tokens.")
    ] = None
    merged_share: Annotated[
        float, Interval(ge=0, le=0.99), Option("Share of sampled steps that equal a sibling, and are merged.")
    ] = 0.0
    draft_acceptance: Annotated[
        float | None,
        Interval(ge=0, le=1),
        Option(
            "Probability that a drafted token is what the path draws, behind ones that are. Default, as measured: 0.91 "
            "for a --draft model, 0.24 for tree."
        ),
    ] = None
