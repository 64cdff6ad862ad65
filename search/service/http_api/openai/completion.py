"""Results of searches and of plain sampling as chat completions and text completions: whole, or in chunks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from espalier.search.completion import Choice, CompletionResult, ReadPrompt, TextSampled, TokenLogprob
from espalier.search.conversation import ToolCall
from espalier.search.request import SearchRequest
from espalier.search.result import Finished, SearchResult, Started, StepDone
from espalier.search.run.executor import AnyEvent
from espalier.search.service.http_api.openai.bodies import SampledCall
from espalier.search.service.shown import Shown, candidates_shown, shown_paths

AnyCompletion = SearchResult | CompletionResult
_BEGINNING = {"role": "assistant", "content": ""}
"""The first delta of a choice of a chat."""


@dataclass(slots=True)
class Completion:
    """One completion of `/v1/completions`, or of a chat if `chat` is set.

    Attributes:
        search_id: the server's name for the search.
        call: what was asked for.
        created: when it began, in seconds since 1970.
        chat: whether it answers a conversation.
    """

    search_id: str
    call: SampledCall
    created: int
    chat: bool = True
    _offsets: dict[int, int] = field(default_factory=dict[int, int])  # characters of tokens sent, by choice
    _read: dict[int, int] = field(default_factory=dict[int, int])  # tokens, by prompt
    _sampled: dict[int, int] = field(default_factory=dict[int, int])  # tokens so far, by node or choice
    _called: dict[int, int] = field(default_factory=dict[int, int])  # calls of tools so far, by choice

    def whole(self, result: AnyCompletion) -> dict[str, Any]:
        """The completion of a result."""
        prompts = () if isinstance(result, SearchResult) else result.prompts
        body = {
            **self._head(""),
            "usage": usage_of(result, self.call),
            "espalier": espalier_of(result, self.call.choices),
            "choices": [self._choice(choice, prompts) for choice in choices_of(result, self.call)],
        }
        if isinstance(result, SearchResult):
            return body | ({"metadata": metadata_of(result)} if self.call.body.return_response_only is False else {})
        if self.chat and self.call.body.return_token_ids:
            body["prompt_token_ids"] = result.prompts[0].token_ids
        return body

    def events(self, event: AnyEvent) -> list[dict[str, Any]]:
        """The chunks of an event. Of a search only the selected path is content, which could not be taken back."""
        match event:
            case Started():
                self._read[0] = event.prompt_tokens
                return [self._chunk({"index": 0, "delta": _BEGINNING})]
            case StepDone():
                self._sampled.update((node.node_id, node.tokens) for node in event.nodes)
                return [self._chunk({"index": 0, "delta": {}}, {"progress": progress_line(event)})]
            case TextSampled():
                return self._chunks(event)
            case Finished(result=SearchResult() | CompletionResult() as result):
                return self.last_chunks(result)
            case _:
                return []

    def _chunks(self, event: TextSampled) -> list[dict[str, Any]]:
        """The chunks of new text: of a chat one with the role first."""
        self._sampled[event.index] = self._sampled.get(event.index, 0) + len(event.token_ids)
        if event.prompt:
            self._read[event.index // self.call.sampled.samples] = len(event.prompt.token_ids)
        delta, calls = self._reasoning(event.thought), self._calls(event.index, event.calls, streamed=True)
        choice, own = self._told(event, event.prompt), {"seed": self.call.sampled.seed} if event.finish_reason else None
        if not self.chat:
            return [self._chunk(choice, own)]
        if event.text or not (event.finish_reason or delta or calls):
            delta["content"] = event.text
        deltas = [*([_BEGINNING] if event.prompt else []), *([delta] if delta else []), *calls]
        if not deltas or (event.finish_reason and self._called.get(event.index)):  # clients look for it alone
            deltas.append({})
        *before, last = deltas
        chunks = [self._chunk({"index": event.index, "delta": each}) for each in before]
        return [*chunks, self._chunk({**choice, "delta": last}, own)]

    def last_chunks(self, result: AnyCompletion) -> list[dict[str, Any]]:
        """The chunks of what has ended: of a search the paths that are shown, and the usage if it is wanted."""
        usage, own = {"usage": usage_of(result, self.call)}, {"espalier": espalier_of(result, self.call.choices)}
        chunks: list[dict[str, Any]] = []
        if isinstance(result, SearchResult):
            for index, path in enumerate(paths_of(result, self.call)):
                deltas: list[dict[str, Any]] = [_BEGINNING] if index else []
                deltas += [thought] if (thought := self._reasoning(path.thought)) else []
                deltas += [{"content": step} for step in path.steps]
                deltas += self._calls(index, path.calls, streamed=True)
                chunks += [self._chunk({"index": index, "delta": delta}) for delta in deltas]
                end = {"index": index, "delta": {}, "finish_reason": self._finish_reason(index, path.finish_reason)}
                chunks.append(self._chunk(end) | ({} if index else own))
            own = {}
        if self.call.body.options.continuous_usage_stats:
            chunks = [chunk | usage for chunk in chunks]
        if self.call.body.options.include_usage:
            chunks.append({**self._head(".chunk" * self.chat), "choices": [], **usage, **own})
        return chunks

    def _chunk(self, choice: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> dict[str, Any]:
        options = self.call.body.options
        usage = {"usage": None} if options.include_usage else {}
        if options.continuous_usage_stats:
            usage = {"usage": _counts(sum(self._read.values()), sum(self._sampled.values()))}
        choice = {"logprobs": None, "finish_reason": None, **choice}
        return {**self._head(".chunk" * self.chat), "choices": [choice], **usage, **({"espalier": own} if own else {})}

    def _choice(self, choice: Choice, prompts: Sequence[ReadPrompt]) -> dict[str, Any]:
        """A choice, with its prompt where it is sampled without a search."""
        told = self._told(choice, prompts[choice.prompt] if prompts else None)
        if prompts:
            told["stop_reason"] = choice.stop_text
        if self.chat:
            thought, calls = self._reasoning(choice.thought), self._calls(choice.index, choice.calls)
            told["finish_reason"] = self._finish_reason(choice.index, choice.finish_reason)
            content = {"content": choice.text or (None if calls else ""), **thought, "refusal": None}
            told["message"] = {"role": "assistant", **content, **({"tool_calls": calls} if calls else {})}
        return told

    def _told(self, part: Choice | TextSampled, prompt: ReadPrompt | None) -> dict[str, Any]:
        """The fields that a choice and its chunks have alike: of a chat all but its text."""
        told: dict[str, Any] = {
            "index": part.index,
            "finish_reason": self._finish_reason(part.index, part.finish_reason),
        }
        if self.call.body.return_token_ids:
            told["token_ids"] = part.token_ids
        if self.chat:
            return {**told, "logprobs": self._chat_logprobs(part.logprobs)}
        text, logprobs = part.text, part.logprobs
        if prompt and self.call.body.return_token_ids:
            told["prompt_token_ids"] = prompt.token_ids
        if prompt and self.call.sampled.echo:
            text, logprobs = prompt.text + text, (*prompt.logprobs, *logprobs)
        return {**told, "text": text, "logprobs": self._text_logprobs(logprobs, part.index)}

    def _calls(self, index: int, calls: Sequence[ToolCall], streamed: bool = False) -> list[dict[str, Any]]:
        """New calls of a choice: whole, or as deltas, of which the first of each has its name."""
        told, first = list[dict[str, Any]](), self._called.get(index, 0)
        self._called[index] = first + len(calls)
        for number, call in enumerate(calls, first):
            head = {"id": call_id(self.search_id, index, number), "type": "function"}
            if not streamed:
                told.append({**head, "function": {"name": call.name, "arguments": call.arguments}})
                continue
            told.append({"index": number, **head, "function": {"name": call.name, "arguments": ""}})
            told.append({"index": number, "function": {"arguments": call.arguments}})
        return [{"tool_calls": [each]} for each in told] if streamed else told

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        """`length` also for a choice that was cut from outside, as the OpenAI API has no other word for it."""
        if reason == "stop" and self._called.get(index):
            return "tool_calls"
        return "length" if reason == "abort" else reason

    def _reasoning(self, thought: str) -> dict[str, str]:
        """A thought as a field of a message or a delta, by both names that clients know; empty if none is told."""
        return {"reasoning_content": thought, "reasoning": thought} if thought and self.call.thoughts else {}

    def _chat_logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if isinstance(self.call.request, SearchRequest) or self.call.sampled.logprobs is None:
            return None

        def entry(token: TokenLogprob) -> dict[str, Any]:
            return {"token": self._name(token), "logprob": token.logprob, "bytes": list(token.raw)}

        return {
            "content": [{**entry(token), "top_logprobs": [entry(each) for each in token.top]} for token in tokens],
            "refusal": None,
        }

    def _text_logprobs(self, tokens: Sequence[TokenLogprob], index: int) -> dict[str, Any] | None:
        """Tokens with their log-probabilities; the likeliest of each place, and always the one that is there."""
        if self.call.sampled.logprobs is None:
            return None
        offsets = list(accumulate(map(_length, tokens), initial=self._offsets.get(index, 0)))
        self._offsets[index] = offsets.pop()
        return {
            "text_offset": offsets,
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                None if token.logprob is None else {self._name(each): each.logprob for each in (*token.top, token)}
                for token in tokens
            ],
        }

    def _name(self, token: TokenLogprob) -> str:
        """A token's text; its bytes where they are no whole character, so that no two tokens have one name."""
        if self.call.body.return_tokens_as_token_ids:
            return f"token_id:{token.token_id}"
        try:
            token.raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)
        return token.token

    def _head(self, suffix: str) -> dict[str, Any]:
        kind, name = ("chat.completion", "chatcmpl") if self.chat else ("text_completion", "cmpl")
        head = {"id": f"{name}-{self.search_id}", "object": kind + suffix}
        return {**head, "created": self.created, "model": self.call.body.model}


def paths_of(result: SearchResult, call: SampledCall) -> list[Shown]:
    """The paths of a search that a call is shown."""
    return [
        path.stopped(call.stop, bool(call.body.include_stop_str_in_output))
        for path in shown_paths(result, call.choices)
    ]


def choices_of(result: AnyCompletion, call: SampledCall) -> Sequence[Choice]:
    """The choices that a call is told."""
    if isinstance(result, CompletionResult):
        return result.choices
    return [
        Choice(
            index,
            0,
            "".join(path.steps),
            (),
            path.finish_reason,
            None,
            (),
            path.thought,
            path.thought_tokens,
            "",
            path.calls,
        )
        for index, path in enumerate(paths_of(result, call))
    ]


def usage_of(result: AnyCompletion, call: SampledCall) -> dict[str, Any]:
    """Tokens as the OpenAI API counts them: all that is sampled is completion, and shown thoughts are reasoning."""
    searched = isinstance(result, SearchResult)
    sampled = result.usage.generated_tokens if searched else result.completion_tokens
    counts = _counts(result.usage.prompt_tokens, sampled)
    thought = sum(choice.thought_tokens for choice in choices_of(result, call))
    return {**counts, **({"completion_tokens_details": {"reasoning_tokens": thought}} if thought or searched else {})}


def _counts(prompt: int, sampled: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def progress_line(event: StepDone) -> str:
    """One line about a round, for people."""
    scores = [node.score for node in event.kept if node.score is not None]
    scores += [event.best.score] if event.best and event.best.score is not None else []
    best = f", best score {max(scores):.2f}" if scores else ""
    return f"Depth {event.depth}: {event.scored} candidates{best}.\n"


def espalier_of(result: AnyCompletion, choices: int) -> dict[str, Any]:
    """Fields of a result that the OpenAI API has no place for, without the texts of the conversation."""
    own = {"search_id": result.search_id, "stop_reason": result.stop_reason, "usage": asdict(result.usage)}
    if isinstance(result, SearchResult):
        configuration = result.configuration.to_dict()
        del configuration["problem"], configuration["history"], configuration["tools"]
        return {
            **own,
            "answer": result.answer,
            "score": result.score,
            "probed": result.probed and asdict(result.probed),
            "candidates": len(result.candidates),
            "choices": [
                {"answer": each.answer, "score": each.score, "multiplicity": each.multiplicity}
                for each in candidates_shown(result, choices)
            ],
            "warnings": result.warnings,
            "configuration": configuration,
        }
    errors = {choice.index: choice.error for choice in result.choices if choice.error}
    return {
        **own,
        **({"errors": errors} if errors else {}),
        **({"warnings": result.warnings} if result.warnings else {}),
        "algorithm": result.configuration.algorithm,
        "seed": result.configuration.seed,
    }


def metadata_of(result: SearchResult) -> dict[str, Any]:
    """All sampled candidates by the names that clients of its_hub read, the selected one first."""
    shown = candidates_shown(result, len(result.candidates))
    candidates = [candidate for candidate in shown for _ in range(candidate.multiplicity)]
    return {
        "algorithm": result.configuration.algorithm,
        "all_responses": [{"role": "assistant", "content": candidate.content} for candidate in candidates],
        "response_counts": Counter(candidate.answer for candidate in candidates),
        "selected_index": 0 if candidates else None,
    }


def _length(token: TokenLogprob) -> int:
    """Characters of a token; those that it shares with its neighbours are left out."""
    return len(token.raw.decode(errors="ignore"))


def call_id(search_id: str, choice: int, number: int) -> str:
    """The id of a call of a tool."""
    return f"call_{search_id}_{choice}_{number}"
