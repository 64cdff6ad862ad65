"""Results of searches as chat completions: whole, or in chunks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from espalier.search.result import Event, Finished, SearchResult, Started, StepDone
from espalier.search.service.http_api.openai.chat_request import ChatCall
from espalier.search.service.shown import Shown, candidates_shown, shown_paths


def reasoning(thought: str) -> dict[str, str]:
    """A thought as a field of a message or a delta, by both names that clients know; empty without one."""
    return {"reasoning_content": thought, "reasoning": thought} if thought else {}


def progress_line(event: StepDone) -> str:
    """One line about a round, for people."""
    scores = [node.score for node in event.kept if node.score is not None]
    scores += [event.best.score] if event.best and event.best.score is not None else []
    best = f", best score {max(scores):.2f}" if scores else ""
    return f"Depth {event.depth}: {event.scored} candidates{best}.\n"


@dataclass(frozen=True, slots=True)
class Completion:
    """One chat completion.

    Attributes:
        search_id: the server's name for the search.
        call: what was asked for.
        created: when it began, in seconds since 1970.
    """

    search_id: str
    call: ChatCall
    created: int
    _prompt_tokens: list[int] = field(default_factory=list[int])
    _sampled: dict[int, int] = field(default_factory=dict[int, int])  # tokens so far, by node

    def whole(self, result: SearchResult) -> dict[str, Any]:
        """The completion of a search that has ended."""
        paths = self._paths(result)
        choices = [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": "".join(path.steps),
                    **reasoning(path.thought * self.call.thoughts),
                    "refusal": None,
                },
                "logprobs": None,
                "finish_reason": path.finish_reason,
            }
            for index, path in enumerate(paths)
        ]
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": usage_of(result, paths),
            "espalier": espalier_of(result, self.call.choices),
            **({"metadata": metadata_of(result)} if self.call.metadata else {}),
        }

    def _paths(self, result: SearchResult) -> list[Shown]:
        its = self.call
        return [path.stopped(its.stop, its.include_stop) for path in shown_paths(result, its.choices)]

    def events(self, event: Event) -> list[dict[str, Any]]:
        """The chunks of an event. Nothing but the selected path is ever content, as it could not be taken back."""
        match event:
            case Started():
                self._prompt_tokens.append(event.prompt_tokens)
                return [self._chunk({"role": "assistant", "content": ""})]
            case StepDone():
                self._sampled.update((node.node_id, node.tokens) for node in event.nodes)
                return [self._chunk({}, espalier={"progress": progress_line(event)})]
            case Finished():
                return self.last_chunks(event.result)
            case _:
                return []

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None = None, index: int = 0, **more: Any
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self.call.include_usage else {}
        if self.call.usage_so_far:
            usage = {"usage": token_counts(sum(self._prompt_tokens), sum(self._sampled.values()))}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage, **more}

    def last_chunks(self, result: SearchResult) -> list[dict[str, Any]]:
        """The chunks of a search that has ended: the selected path, how it ended, and the usage if wanted."""
        paths = self._paths(result)
        chunks: list[dict[str, Any]] = []
        for index, path in enumerate(paths):
            if index:
                chunks.append(self._chunk({"role": "assistant", "content": ""}, index=index))
            if path.thought and self.call.thoughts:
                chunks.append(self._chunk(reasoning(path.thought), index=index))
            chunks += [self._chunk({"content": step}, index=index) for step in path.steps]
            own = {} if index else {"espalier": espalier_of(result, self.call.choices)}
            chunks.append(self._chunk({}, path.finish_reason, index, **own))
        usage = {"usage": usage_of(result, paths)}
        if self.call.usage_so_far:
            chunks = [chunk | usage for chunk in chunks]
        if self.call.include_usage:
            chunks.append({**self._head("chat.completion.chunk"), "choices": [], **usage})
        return chunks

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.search_id}", "object": kind, "created": self.created, "model": self.call.model}


def usage_of(result: SearchResult, paths: Sequence[Shown]) -> dict[str, Any]:
    """Tokens as the OpenAI API counts them: all that is sampled is completion, and shown thoughts are reasoning."""
    counts = token_counts(result.usage.prompt_tokens, result.usage.generated_tokens)
    return {**counts, "completion_tokens_details": {"reasoning_tokens": sum(path.thought_tokens for path in paths)}}


def token_counts(prompt: int, sampled: int) -> dict[str, Any]:
    """Tokens as the OpenAI API counts them."""
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def espalier_of(result: SearchResult, choices: int) -> dict[str, Any]:
    """Fields of a result that the OpenAI API has no place for, without the texts of the conversation."""
    configuration = result.configuration.to_dict()
    del configuration["problem"], configuration["history"]
    return {
        "search_id": result.search_id,
        "answer": result.answer,
        "score": result.score,
        "stop_reason": result.stop_reason,
        "probed": result.probed and asdict(result.probed),
        "candidates": len(result.candidates),
        "choices": [
            {"answer": each.answer, "score": each.score, "multiplicity": each.multiplicity}
            for each in candidates_shown(result, choices)
        ],
        "warnings": result.warnings,
        "usage": asdict(result.usage),
        "configuration": configuration,
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
