"""Results of searches as chat completions: whole, or in chunks."""

from dataclasses import asdict, dataclass
from typing import Any

from espalier.search.result import Candidate, NodeRecord, SearchResult, StepDone


@dataclass(frozen=True, slots=True)
class Shown:
    """The path that is shown for a search.

    Attributes:
        steps: its texts.
        tokens: number of tokens sampled for it.
        finish_reason: `stop` if the path is complete, `length` if a limit cut it.
    """

    steps: tuple[str, ...]
    tokens: int
    finish_reason: str


def shown(result: SearchResult) -> Shown:
    """Return the path to show: the selected one.

    Where no path has an answer, it is the best complete one; where none is complete, the one that came furthest.
    """
    nodes = {node.node_id: node for node in result.nodes}
    best = result.best or max(result.candidates, key=_score, default=None)
    furthest = max(result.nodes, key=lambda node: (len(node.path), _score(node)), default=None)
    node = nodes.get(best.node_id) if best else furthest
    path: list[NodeRecord] = []
    while node is not None and node.parent_id is not None:
        path.insert(0, node)
        node = nodes.get(node.parent_id)
    steps = tuple(step.text for step in (best.steps if best else path))
    return Shown(steps, sum(step.tokens for step in path), "stop" if best else "length")


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
        model: the name that the client used.
        created: when it began, in seconds since 1970.
        include_usage: whether chunks have the usage, null in all but the last.
    """

    search_id: str
    model: str
    created: int
    include_usage: bool = False

    def whole(self, result: SearchResult) -> dict[str, Any]:
        """The completion of a search that has ended."""
        path = shown(result)
        message = {"role": "assistant", "content": "".join(path.steps), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": path.finish_reason}
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": usage_of(result, path),
            "espalier": espalier_of(result),
        }

    def chunk(self, delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
        """A chunk with something new."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self.include_usage else {}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage, **more}

    def reasoning(self, text: str) -> dict[str, Any]:
        """A chunk about the search, which is no part of the answer; by both names that clients know."""
        return self.chunk({"reasoning_content": text, "reasoning": text})

    def last_chunks(self, result: SearchResult) -> list[dict[str, Any]]:
        """The chunks of a search that has ended: the selected path, how it ended, and the usage if wanted."""
        path = shown(result)
        chunks = [self.chunk({"content": step}) for step in path.steps]
        chunks.append(self.chunk({}, path.finish_reason, espalier=espalier_of(result)))
        if self.include_usage:
            chunks.append({**self._head("chat.completion.chunk"), "choices": [], "usage": usage_of(result, path)})
        return chunks

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.search_id}", "object": kind, "created": self.created, "model": self.model}


def usage_of(result: SearchResult, path: Shown) -> dict[str, Any]:
    """Tokens as the OpenAI API counts them: all that the search sampled is completion, all but the path reasoning."""
    usage = result.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.generated_tokens,
        "total_tokens": usage.prompt_tokens + usage.generated_tokens,
        "completion_tokens_details": {"reasoning_tokens": max(0, usage.generated_tokens - path.tokens)},
    }


def espalier_of(result: SearchResult) -> dict[str, Any]:
    """Fields of a result that the OpenAI API has no place for, without the texts of the conversation."""
    configuration = result.configuration.to_dict()
    del configuration["problem"], configuration["history"]
    return {
        "search_id": result.search_id,
        "answer": result.answer,
        "score": result.score,
        "stop_reason": result.stop_reason,
        "candidates": len(result.candidates),
        "warnings": result.warnings,
        "usage": asdict(result.usage),
        "configuration": configuration,
    }


def _score(scored: Candidate | NodeRecord) -> float:
    return -1.0 if scored.score is None else scored.score
