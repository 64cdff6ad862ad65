"""Errors that a user can cause or meet: each says what is wrong, names the limit, and says what to change."""

import copyreg
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

_MAX_NAMED = 8
"""Tokens that one error or warning names."""
_MAX_GUESSED = 64
"""Characters of the longest name for which one like it is looked for."""
_MAX_FILES = 200
"""Files of a folder among which one like a missing one is looked for."""


class EspalierError(Exception):
    """Base of every error raised on purpose; its text is fit for a user to read. It can be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Made without `__init__`, which takes other arguments than the text in `args`.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # pyright: ignore[reportAttributeAccessIssue]


class CheckpointError(EspalierError):
    """A checkpoint is missing, unsupported, or does not hold what its configuration promises."""


class TemplateLimitError(CheckpointError):
    """A checkpoint's chat template takes more time or memory than any prompt does, or makes a longer one."""


class FamilySpecError(CheckpointError):
    """A file that describes a family of process reward models holds an unknown key or a value it cannot have."""


class FatalError(EspalierError):
    """An error of the whole process, not of one search: every running search ends."""


class DeviceError(FatalError):
    """A batch could not be computed: the device failed, or has too little memory."""

    def __init__(self, role: str, device: str, error: BaseException) -> None:
        super().__init__(f"the {role} could not be run on {device}: {first_line(error)}")


class ScoreMismatchError(FatalError):
    """A score computed step by step differs from that of the whole text: a fault in the family or the engine.

    Attributes:
        incremental: the score from the step's own tokens after its parent's.
        whole: the score from the whole text in a fresh sequence.
    """

    def __init__(self, family: str, step: int, incremental: float, whole: float, tolerance: float) -> None:
        self.incremental = incremental
        self.whole = whole
        super().__init__(
            f"--verify-incremental: {family} gives step {step} of a path {incremental!r} step by step and {whole!r} "
            f"from the whole text, {abs(incremental - whole):.3g} apart where at most {tolerance:.3g} is allowed; "
            "please report this with the family's name and the device"
        )


class MisuseError(EspalierError, ValueError):
    """A call that the engine's contract rules out: a fault of the caller. Nothing has changed."""


class PartialFailureError(EspalierError):
    """The work of some owners cannot continue; that of all others does, with the next step.

    Attributes:
        owners: the owners to cancel.
    """

    def __init__(self, text: str, owners: frozenset[Hashable]) -> None:
        self.owners = owners
        super().__init__(text)


class NumericalError(PartialFailureError):
    """A model's results are not numbers: its weights are damaged, or do not fit the range of its dtype."""

    def __init__(self, role: str, owners: frozenset[Hashable]) -> None:
        super().__init__(
            f"the {role}'s logits are not numbers; its weights are damaged or too large for --dtype: try float32 or "
            "bfloat16",
            owners,
        )


class StepError(PartialFailureError):
    """A fault in the engine's own code ended a step; that of the owners whose work was in it is lost."""

    def __init__(self, role: str, owners: frozenset[Hashable]) -> None:
        super().__init__(f"an internal fault ended a step of the {role}; the log says more", owners)


class RequestTooLargeError(EspalierError):
    """A request can never fit: its worst case is over a limit even on an idle engine."""


class PoolTooSmallError(RequestTooLargeError):
    """The worst case of one search is larger than the whole KV pool.

    Attributes:
        needed_bytes: KV bytes the search may need at its widest, in whole slabs.
        pool_bytes: bytes of the pool.

    `lower` names what of the request to lower.
    """

    def __init__(
        self, needed_bytes: int, pool_bytes: int, lower: str = "-N, -M, --max-tokens or --max-step-tokens"
    ) -> None:
        self.needed_bytes = needed_bytes
        self.pool_bytes = pool_bytes
        super().__init__(
            f"a search may need {_size(needed_bytes)} of KV memory and the pool holds {_size(pool_bytes)}; "
            f"raise --kv-memory, or lower {lower}"
        )


class PoolExhaustedError(PartialFailureError):
    """No block is free, and no running work could free one."""

    def __init__(self, text: str, owners: frozenset[Hashable] = frozenset()) -> None:
        super().__init__(text, owners)


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of a request that breaks a rule: the field's name and what it must be."""

    field: str
    description: str


class InvalidRequestError(EspalierError):
    """A request breaks rules; lists all of them, not only the first."""

    def __init__(self, violations: list[Violation]) -> None:
        self.violations = violations
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))


class NoEmbeddingError(InvalidRequestError):
    """A text holds tokens that the model has no embedding for.

    Attributes:
        tokens: each such token as it is written, by its id.
    """

    def __init__(self, role: str, tokens: Mapping[int, str]) -> None:
        self.tokens = dict(tokens)
        named = name_tokens(tokens)
        super().__init__([Violation("problem", f"holds {named}, for which the {role} has no embedding; reword it")])


def name_tokens(tokens: Mapping[int, str]) -> str:
    """A list of tokens and their ids for a person to read, cut short where there are many."""
    some = ", ".join(f"{token!r} (id {i})" for i, token in list(tokens.items())[:_MAX_NAMED])
    return some + (f" and {len(tokens) - _MAX_NAMED} more" if len(tokens) > _MAX_NAMED else "")


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def nearest(word: object, known: Iterable[object]) -> str:
    """A hint behind an unknown name: the known one that looks most like it; empty where none does."""
    from difflib import get_close_matches

    names = {str(name).lower().replace("-", "_"): str(name) for name in known}
    asked = str(word)[: _MAX_GUESSED + 1].lower().replace("-", "_")
    # Comparing takes the square of the length.
    found = get_close_matches(asked, names, 1) if len(asked) <= _MAX_GUESSED else []
    return f"; did you mean {names[found[0]]!r}?" if found else ""


def nearest_of_each(words: Sequence[str], known: Collection[object]) -> str:
    """Unknown names with commas between them, and the hint of `nearest` behind each; of many, the first."""
    if len(words) == 1:
        return words[0] + nearest(words[0], known)
    hints = [nearest(word, known).removeprefix("; ") for word in words[:_MAX_NAMED]]
    named = [f"{word} ({hint})" if hint else word for word, hint in zip(words[:_MAX_NAMED], hints, strict=True)]
    return ", ".join(named) + (f" and {len(words) - _MAX_NAMED} more" if words[_MAX_NAMED:] else "")


def nearest_file(path: Path) -> str:
    """The hint of `nearest` for a file that is not there, of those in its folder; empty where that cannot be read."""
    try:
        return nearest(path.name, [entry.name for entry in islice(path.parent.iterdir(), _MAX_FILES)])
    except (OSError, ValueError):
        return ""


def rule_of(message: str) -> str:
    """The message of a validator without what pydantic puts before it."""
    return message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
