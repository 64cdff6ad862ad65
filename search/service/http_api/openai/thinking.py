"""Spellings of a switch for thinking, as one: whether to think, for how many tokens, and whether thoughts are shown.

OpenAI's, OpenRouter's, Anthropic's, DeepSeek's and GLM's, Qwen's, Ollama's, Groq's, vLLM's and llama.cpp's clients each
have their own, and proxies add them by the provider's name.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from espalier.engine.errors import Violation
from espalier.search.thoughts.mode import MAX_THINKING, SWITCHES, ThinkingMode

_OBJECTS = ("thinking", "reasoning", "chat_template_kwargs")
"""Parameters whose fields are spellings; `chat_template_kwargs` holds other variables of the template, too."""


@dataclass(frozen=True, slots=True)
class _Said:
    """The meaning of one spelling; None for what it leaves open."""

    on: bool | None = None
    budget: int | None = None
    shown: bool | None = None


_ON, _OFF, _OPEN = _Said(on=True), _Said(on=False), _Said()


def _words(*words: Mapping[Any, _Said]) -> Callable[[Any], _Said]:
    """A reader of texts, of true and of false."""
    known = {each: said for some in words for each, said in some.items()}

    def read(value: Any) -> _Said:
        found = known.get(value) if isinstance(value, str | bool) else None
        if found is None:
            raise ValueError(f"must be one of {', '.join(str(each).lower() for each in known)}")
        return found

    return read


def _budget(value: Any) -> _Said:
    """Tokens of a thought; 0 is none, -1 as many as there is room for."""
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise ValueError("must be a number of tokens, 0 for no thought or -1 for no limit")
    return _OFF if value == 0 else _Said(budget=value) if 0 < value <= MAX_THINKING else _OPEN


def _effort(value: Any) -> _Said:
    """An effort; other words than `none` are for the template, and leave the switch open."""
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return _OFF if value == "none" else _OPEN


_SWITCH = {True: _ON, False: _OFF}
_EFFORTS = dict.fromkeys(("minimal", "low", "medium", "high", "xhigh", "max"), _ON) | {"none": _OFF}
_SHOWN = {True: _Said(shown=True), False: _Said(shown=False)}
_SPELLINGS: Mapping[str, Callable[[Any], _Said]] = {
    "enable_thinking": _words(_SWITCH),
    "think": _words(_SWITCH, _EFFORTS),
    "thinking": _words(_SWITCH),
    "thinking.type": _words({"enabled": _ON, "disabled": _OFF, "adaptive": _OPEN, "auto": _OPEN}),
    "thinking.budget_tokens": _budget,
    "thinking.display": _words({"summarized": _OPEN, "omitted": _Said(shown=False)}),
    "thinking_budget": _budget,
    "thinking_budget_tokens": _budget,
    "thinking_token_budget": _budget,
    "reasoning_budget": _budget,
    "reasoning_effort": _effort,
    "reasoning": _words(_SWITCH),
    "reasoning.effort": _effort,
    "reasoning.enabled": _words(_SWITCH),
    "reasoning.max_tokens": _budget,
    "reasoning.exclude": _words({not each: said for each, said in _SHOWN.items()}),
    "reasoning.summary": lambda _: _OPEN,
    "reasoning.generate_summary": lambda _: _OPEN,
    "include_reasoning": _words(_SHOWN),
    "reasoning_format": _words({"hidden": _Said(shown=False), "parsed": _OPEN, "deepseek": _OPEN, "auto": _OPEN}),
    "chat_template_kwargs.enable_thinking": _words(_SWITCH),
    "chat_template_kwargs.thinking": _words(_SWITCH),
    "chat_template_kwargs.thinking_budget": _budget,
    "chat_template_kwargs.reasoning_effort": _effort,
}
"""Readers of the spellings, by the place in the body; each says in a ValueError what its value must be."""
THINKING_PARAMETERS = frozenset(name.partition(".")[0] for name in _SPELLINGS)


@dataclass(frozen=True, slots=True)
class AskedThinking:
    """The thinking that a body asks for in all its spellings together.

    Attributes:
        on: whether to think; None if that is left open.
        budget: most tokens of a thought, the lowest of all that are given; None for no limit.
        shown: whether thoughts are told.
        effort: for the template; None without.
        places: of the body, that say the switch and the budget; empty for what is not said.
    """

    on: bool | None = None
    budget: int | None = None
    shown: bool = True
    effort: str | None = None
    places: tuple[str, str] = ("", "")

    @property
    def field(self) -> str | None:
        """The `thinking` of a search; None if it is left open."""
        if self.on is False:
            return "off"
        return str(self.budget) if self.budget else "on" if self.on else None

    @property
    def place(self) -> str:
        """The place of the body that says `field`."""
        switch, budget = self.places
        return switch if self.on is False else budget or switch

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of a chat template; templates do not look at what they do not know."""
        effort = {} if self.effort is None else {"reasoning_effort": self.effort}
        mode = ThinkingMode.AUTO if self.on is None else ThinkingMode.ON if self.on else ThinkingMode.OFF
        return {**effort, **SWITCHES[mode]}


def read_thinking_parameters(body: Mapping[str, Any], found: list[Violation]) -> AskedThinking:
    """Read all spellings of a body; what is wrong, or contradicts another one, goes to `found`.

    A budget is a limit, so it does not contradict that there be no thought.
    """
    said = dict(_said(body, found))
    switches = {place: its.on for place, its in said.items() if its.on is not None}
    shown = {place: its.shown for place, its in said.items() if its.shown is not None}
    for given in (switches, shown):
        for place in given:
            if given[place] != given[first := next(iter(given))]:
                found.append(Violation(place, f"contradicts `{first}`; give one of them"))
    budgets = {place: its.budget for place, its in said.items() if its.budget is not None}
    reasoning = body.get("reasoning")
    efforts = body.get("reasoning_effort"), body.get("think"), reasoning.get("effort") if _is(reasoning) else None
    return AskedThinking(
        on=next(iter(switches.values()), None),
        budget=min(budgets.values(), default=None),
        shown=all(shown.values()),
        effort=next((each for each in efforts if isinstance(each, str)), None),
        places=(next(iter(switches), ""), min(budgets, key=budgets.__getitem__, default="")),
    )


def is_spelling(place: str, value: Any) -> bool:
    """Return whether a value at this place of a body is a spelling of thinking."""
    try:
        return bool(_SPELLINGS[place](value))
    except (KeyError, ValueError):
        return False


def _said(body: Mapping[str, Any], found: list[Violation]) -> Iterator[tuple[str, _Said]]:
    for place, value in _places(body):
        of_template = place.startswith("chat_template_kwargs.")  # whose variables may be anything, and null a value
        if (read := _SPELLINGS.get(place)) is None:
            found += [] if of_template else [Violation(place[:80], "is unknown")]
            continue
        try:
            yield place, read(value)
        except ValueError as error:
            found += [] if of_template else [Violation(place, str(error))]


def _places(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values of a body that are spellings, fields of objects by both names; null says nothing."""
    for name in sorted(THINKING_PARAMETERS & body.keys()):
        value = body[name]
        if name in _OBJECTS and _is(value):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items() if each is not None)
        elif value is not None:
            yield name, value


def _is(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)
