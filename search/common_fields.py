"""Fields that every search has, and the enumerations of their values; `request` adds those of single algorithms."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from annotated_types import Interval

from espalier.engine.errors import Violation
from espalier.search import rules
from espalier.search.conversation import AboutProblem, ChatMessage
from espalier.search.schema import MAX_ITEMS, CodeName, Parsed, mapping_text, option, optional, parsed, read_texts

if TYPE_CHECKING:
    from espalier.search.tools.declared import Offered, Tool
    from espalier.search.tools.plan import CallPlan

DEFAULT_MAX_TOKENS = 2048
"""Default limit on the generated tokens of one path."""
DEFAULT_MAX_STEPS = 40
DEFAULT_MAX_STEP_TOKENS = 256
MAX_PATH_TOKENS = 2**20
"""Largest limit on the tokens of a path that can be asked for."""


class AlgorithmName(StrEnum):
    """Available search algorithms."""

    GREEDY = "greedy"
    CHAIN = "chain"
    MAJORITY = "majority"
    BEST_OF_N = "best-of-n"
    ADAPTIVE = "adaptive"
    BEAM = "beam"
    DVTS = "dvts"
    LOOKAHEAD = "lookahead"
    REBASE = "rebase"
    PARTICLE = "particle"
    MCTS = "mcts"
    AUTO = "auto"


class Aggregation(StrEnum):
    """Ways to combine the scores of a path's steps into the path's score."""

    LAST = "last"
    MIN = "min"
    PROD = "prod"
    MEAN = "mean"


class Vote(StrEnum):
    """Ways to select one answer from the complete paths.

    `naive` takes the answer of the best-scored path, `weighted` the answer with the largest sum of path scores,
    `majority` the answer given by most paths. The others are weighted votes by the generator's own confidence in a path
    in place of its score, and need no verifier; see `growth.confidence`.
    """

    NAIVE = "naive"
    WEIGHTED = "weighted"
    MAJORITY = "majority"
    CONFIDENCE = "confidence"
    TAIL_CONFIDENCE = "tail-confidence"
    LOWEST_CONFIDENCE = "lowest-confidence"

    @property
    def reads_confidence(self) -> bool:
        """True if a path's score is the generator's confidence in it."""
        return self in (Vote.CONFIDENCE, Vote.TAIL_CONFIDENCE, Vote.LOWEST_CONFIDENCE)


class EarlyStop(StrEnum):
    """Policies of ending a search of independent paths once its answer is decided; see `growth.early_stop`."""

    OFF = "off"
    DECIDED = "decided"
    FRUGAL = "frugal"


_BIAS = re.compile(r"\s*(\d{1,10})\s*:\s*([+-]?\d{1,20}(?:\.\d*)?(?:[eE][+-]?\d{1,3})?)\s*", re.ASCII)


Bias = tuple[tuple[int, float], ...]
"""Ids of tokens, ascending, each with what is added to its logit."""


def read_bias(text: str) -> Bias:
    """Read a `logit_bias`: ids of tokens, ascending, each with what is added to its logit.

    Raises:
        ValueError: it is none, is of too many tokens, or a value is out of range.
    """
    parts = text.split(",") if text else []
    if len(parts) > MAX_ITEMS:
        raise ValueError(f"must be of at most {MAX_ITEMS} tokens, is of {len(parts)}")
    found: dict[int, float] = {}
    for part in parts:
        if not (match := _BIAS.fullmatch(part)):
            raise ValueError(f"must have ids of tokens with numbers, like 13:-100,50256:2.5; has {part[:40]!r}")
        token, value = int(match[1]), float(match[2])
        if token in found:
            raise ValueError(f"must have each token once, has {token} twice")
        if not -100 <= value <= 100:
            raise ValueError(f"must be between -100 and 100 for each token, is {match[2]} for {token}")
        found[token] = value
    return tuple(sorted(found.items()))


def bias_text(bias: str | Mapping[Any, Any]) -> str:
    """Write a bias, text or a mapping, as `read_bias` reads it, by ascending ids; raises as that does."""
    return mapping_text(dict(read_bias(bias if isinstance(bias, str) else mapping_text(bias))))


def unknown_bias(bias: Sequence[tuple[int, float]], vocabulary: int) -> str:
    """Return what is wrong with the tokens of a bias; empty if all of them are below `vocabulary`."""
    last = bias[-1][0] if bias else 0
    return f"must have tokens below {vocabulary}, the generator's vocabulary; has {last}" if last >= vocabulary else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyFields:
    """Penalties and biases of whatever samples from the generator, as vLLM has them; see `engine.work.Penalties`."""

    repetition_penalty: float | None = optional(
        "Divides the logits of tokens that stand in the prompt or the path, and multiplies negative ones; 1 for "
        "none. Default: generation_config.json's, else 1.",
        Interval(gt=0, le=100),
    )
    presence_penalty: float | None = optional(
        "Taken off the logits of tokens that stand in the path behind the prompt; default: 0.", Interval(ge=-2, le=2)
    )
    frequency_penalty: float | None = optional(
        "Taken off for each time that they stand there; default: 0.", Interval(ge=-2, le=2)
    )
    logit_bias: Parsed[Bias] = parsed(
        read_bias,
        "",
        "Added to the logits of tokens by their ids, each between -100 and 100: 13:-100,50256:2.5. Default: none.",
        empty=(),
        parse=bias_text,
        has_commas=True,
    )

    def __post_init__(self) -> None:
        read_texts(self)


def _read_tools(text: str) -> "Offered":
    from espalier.search.tools.declared import read_tools  # for requests with tools alone

    return read_tools(text)


CHOICES = ("auto", "none", "required")
"""Values of `tool_choice` that are no name of a tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFields(PenaltyFields):
    """Tools that the generator may call, as OpenAI's clients have them.

    Attributes:
        tools: a JSON list of their declarations; empty for none.
        tool_choice: `auto` leaves it to the model, `none` forbids calls and `required` asks for one; or the name of the
            tool to call.
        parallel_tool_calls: whether one answer may have several calls.
    """

    tools: Parsed[Any] = parsed(_read_tools)
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True

    @property
    def callable_tools(self) -> "tuple[Tool, ...]":
        """The tools that may be called."""
        offered = self.tools.value if isinstance(self.tools, Parsed) else None  # text that is wrong has no value
        if not offered or self.tool_choice == "none":
            return ()
        if self.tool_choice in CHOICES:
            return offered.tools
        return tuple(tool for tool in offered.tools if tool.name == self.tool_choice)

    @property
    def call_plan(self) -> "CallPlan | None":
        """The plan of its answers' calls; None where there are none, and before it is resolved."""
        return self.tools.value if hasattr(self.tools.value, "form") else None

    @property
    def must_call(self) -> bool:
        """True if the answer must be a call."""
        return self.tool_choice not in ("auto", "none")

    def tool_violations(self) -> list[Violation]:
        """Validate the choice against the tools."""
        if not self.must_call or self.callable_tools:
            return []
        named = ", ".join(tool.name for tool in self.tools.value.tools[:16]) if self.tools.value else "there are none"
        rule = f"must be auto, none, required, or the name of one of the tools ({named}), is {self.tool_choice[:80]!r}"
        return [Violation("tool_choice", rule)]


@dataclass(frozen=True, slots=True)
class CommonFields(ToolFields, AboutProblem):
    """One problem and the fields of a search on it that an algorithm may read.

    `beam_width` is N, the number of paths kept after each step; `expansion` is M, the children sampled from each kept
    path. A step scores N*M candidates. (search-and-learn's `n` is our N*M, and its `beam_width` is our M.) Their
    meaning depends on the algorithm, which declares the fields that it uses; see `algorithms.base.SearchAlgorithm`.

    `history` holds the messages of a conversation before the problem, the oldest first. A first message of the role
    `system` replaces the generator's system prompt. The generator reads the conversation through its chat template, the
    verifier as plain text without the system message, `problem_text`.
    """

    problem: str
    algorithm: AlgorithmName | CodeName | None = optional(
        "Which search; search/algorithms/README.md says what each does, and how to write one. Default: beam; "
        "best-of-n where the verifier scores whole answers; without a verifier majority, greedy for a single path.",
        short="-a",
    )
    beam_width: int = option(
        4,
        "N: paths kept after each step, subtrees, particles, or independent paths. (search-and-learn's n is N·M.)",
        Interval(ge=1, le=256),
        short="-N",
    )
    expansion: int = option(
        4,
        "M: children sampled from each kept path. adaptive: paths sampled at a time. (search-and-learn's beam_width.)",
        Interval(ge=1, le=64),
        short="-M",
    )
    vote: Vote | None = optional(
        "How to select the answer; default: majority for majority, adaptive and single paths, else weighted."
    )
    aggregation: Aggregation = option(Aggregation.LAST, "How to combine the scores of a path's steps.")
    temperature: float | None = optional(
        "Sampling temperature, 0 for greedy; default: generation_config.json's for the mode of --thinking, "
        "ignoring do_sample, else 0.8.",
        Interval(ge=0, le=10),
    )
    top_k: int | None = optional(
        "Sample from the k most likely tokens, 0 for all; default: generation_config.json's, else 0.",
        Interval(ge=0, le=2**31 - 1),
    )
    top_p: float | None = optional(
        "Nucleus sampling: probability mass to keep; default: generation_config.json's, else 1.", Interval(gt=0, le=1)
    )
    min_p: float | None = optional(
        "Minimum probability relative to the most likely token; default: generation_config.json's, else 0.",
        Interval(ge=0, le=1),
    )
    step_rule: Parsed[rules.StepRule] = parsed(
        rules.read_step_rule,
        "paragraph",
        "Where a step ends: paragraph, at a blank line; tokens:64, after so many tokens; text:###, after this "
        "text; markers, where a sentence begins with Wait, So, Let me and the like.",
    )
    end_at_box: bool = option(
        True,
        "End a path with the paragraph of its first boxed answer. Otherwise it goes on to its own end, and its "
        "last boxed answer counts.",
    )
    thinking: Parsed[rules.Thinking] = parsed(
        rules.read_thinking,
        "auto",
        "Whether the generator thinks before it answers: auto, as its chat template has it; off; on; or at most so "
        "many tokens, after which its thought is closed for it. Room for the answer is always kept.",
    )
    more_thinking: int = option(
        0,
        "How often a path whose model closes its thought has to think on: Wait is written in place of the mark, "
        "within the thought's budget.",
        Interval(ge=0, le=64),
    )
    probe_every: int | None = optional(
        "Read each path's answer so far after every so many of its tokens, at the end of a step, on a fork that is "
        "dropped. A search that is cut short then answers by its probes. Default: never.",
        Interval(ge=1, le=MAX_PATH_TOKENS),
    )
    stop_when: Parsed[rules.StopRule | None] = parsed(
        rules.read_stop_rule,
        "",
        "Close a thought once its last probes agree: agree:3,certainty:0.9,tokens:512, three probes with the same "
        "answer, each at least so certain, and not before 512 tokens of its path. Needs --probe-every. Default: "
        "never.",
        has_commas=True,
    )
    max_steps: int | None = optional(
        "Maximum depth, in steps; default: 40, or no limit for searches that sample whole paths.",
        Interval(ge=1, le=MAX_PATH_TOKENS),
    )
    max_step_tokens: int | None = optional(
        "Maximum tokens of one step; a step that is full ends, and its path goes on. Default: 256, or no limit for "
        "searches that sample whole paths.",
        Interval(ge=1, le=MAX_PATH_TOKENS),
    )
    max_tokens: int | None = optional(
        f"Maximum tokens of one path, thought and answer; default: {DEFAULT_MAX_TOKENS}, 16384 for generators that "
        "think, or what the context leaves.",
        Interval(ge=1, le=MAX_PATH_TOKENS),
    )
    seed: int = option(0, "Seed of all sampling.", Interval(ge=0, le=2**63 - 1))
    generator_budget: int | None = optional(
        "Maximum tokens sampled in the whole search, and of its probes; default: no limit.",
        Interval(ge=1, le=16 * 2**20),
    )
    verifier_budget: int | None = optional(
        "Maximum verifier tokens in the whole search, including the problem; default: no limit.",
        Interval(ge=1, le=16 * 2**20),
    )
    time_limit: float | None = optional(
        "Seconds from submission after which the search returns its best answer so far; default: no limit.",
        Interval(gt=0, le=24 * 3600),
    )
    merge_duplicates: bool = option(
        True,
        "Compute equal samples of a step once and count them. The distribution of answers does not change, "
        "computing each by itself is just slower.",
    )
    early_stop: EarlyStop = option(
        EarlyStop.DECIDED,
        "majority, best-of-n: whether to end once no path can change the answer any more: off, decided, or frugal, "
        "which runs only as many paths at a time as could decide it: fewer tokens, in more rounds.",
    )
    stop_unsure: Parsed[rules.UnsureRule | None] = parsed(
        rules.read_unsure_rule,
        "",
        "majority, best-of-n, adaptive: stop paths that the generator is unsure of. first:16,keep:90 runs 16 paths "
        "to their ends; a later one is stopped, without a vote, once the mean log-probability of 2048 of its "
        "tokens, or with group:T of T, is below that of nine tenths of the first. early_stop has then no effect. "
        "Default: none is stopped.",
        has_commas=True,
    )
    answer_form: Parsed[rules.Form | None] = parsed(
        rules.read_form,
        "",
        "The form of what stands in \\boxed{}, without which a path has no answer: a regular expression, json: and "
        "a JSON schema, or grammar: and a Lark grammar. Thoughts and steps stay free. Default: any.",
        has_commas=True,
    )
    text_form: Parsed[rules.Form | None] = parsed(
        rules.read_form,
        "",
        "The form of the whole text behind the thought, which is then the answer; written like --answer-form. "
        "Default: any.",
        has_commas=True,
    )
    history: tuple[ChatMessage, ...] = ()

    @property
    def path_limit(self) -> int:
        """Maximum tokens of one path by the limits on tokens and steps, whatever the context leaves."""
        tokens = self.max_tokens or DEFAULT_MAX_TOKENS
        return min(tokens, self.max_steps * self.max_step_tokens) if self.max_steps and self.max_step_tokens else tokens


def answer_in(text: str, request: CommonFields) -> str:
    """The answer of a complete path with this text behind its thought; empty if it gives none."""
    if request.callable_tools:
        from espalier.search.tools.declared import answer_of_calls  # for requests with tools alone
        from espalier.search.tools.plan import calls_in

        if calls := calls_in(text, request.call_plan, request.callable_tools, request.parallel_tool_calls):
            return answer_of_calls(calls)
        if request.must_call:
            return ""
    if request.text_form:
        return text.strip()
    if request.answer_form.value:
        return request.answer_form.value.last_in_box(text)
    from espalier.search.grading.answers import extract_answer  # here, as a client needs no grading

    return extract_answer(text)
