"""A result as blocks that follow one another (thought, text, calls of tools): the base of its writers by protocol."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from espalier.search.completion import Choice, CompletionResult, TextSampled
from espalier.search.conversation import ToolCall
from espalier.search.result import Finished, SearchResult, Started
from espalier.search.run.executor import AnyEvent
from espalier.search.service.http_api.openai.bodies import SampledCall
from espalier.search.service.http_api.openai.completion import AnyCompletion, choices_of, paths_of

Kind = Literal["thought", "text", "call"]
Events = list[dict[str, Any]]


@dataclass(slots=True)
class Block:
    """A block that is being written; the text of a call is that of its arguments."""

    kind: Kind
    text: str = ""
    call: ToolCall | None = None


class BlockWriter(ABC):
    """Writes one result: whole, or as the events of a stream. Of a search only the selected path is told."""

    def __init__(self, search_id: str, call: SampledCall) -> None:
        self._id, self._call = search_id, call
        self._begun = False
        self._block: Block | None = None  # which is open
        self._blocks: Events = []  # those that are done
        self._said: Counter[Kind] = Counter()  # characters, or calls, of each kind
        self._result: dict[str, Any] = {}

    def whole(self, result: AnyCompletion) -> dict[str, Any]:
        """The body of a result."""
        self.events(Finished(self._id, result))
        return self._result

    def events(self, event: AnyEvent) -> Events:
        """The events of the stream that one of the search or the sampling makes."""
        match event:
            case Started():
                return self._begin(event.prompt_tokens)
            case TextSampled():
                made = self._begin(len(event.prompt.token_ids) if event.prompt else 0)
                return [*made, *self._add(event.thought, (event.text,), event.calls)]
            case Finished(result=SearchResult() | CompletionResult() as result):
                choice, said = choices_of(result, self._call)[0], self._said
                searched = isinstance(result, SearchResult)
                texts = paths_of(result, self._call)[0].steps if searched else (choice.text[said["text"] :],)
                made = self._begin(result.usage.prompt_tokens)
                made += self._add(choice.thought[said["thought"] :], texts, choice.calls[said["call"] :])
                made += [] if said["text"] or said["call"] else self._write("text", "")
                made += self._close(cut=choice.finish_reason in ("length", "abort"))
                return [*made, *self._ended(result, choice)]
            case _:
                return []

    def _begin(self, prompt_tokens: int) -> Events:
        begun, self._begun = self._begun, True
        return [] if begun else self._beginning(prompt_tokens)

    def _add(self, thought: str, texts: Iterable[str], calls: Iterable[ToolCall]) -> Events:
        made = self._write("thought", thought) if thought and self._call.thoughts else []
        for text in filter(None, texts):
            made += self._write("text", text)
        for call in calls:
            made += self._write("call", call.arguments, call)
        return made

    def _write(self, kind: Kind, text: str, call: ToolCall | None = None) -> Events:
        """The events of text in the block of this kind, which begins behind the one before; a call is a block."""
        made: Events = []
        if self._block is None or self._block.kind != kind or call:
            made += self._close()
            self._block = Block(kind, call=call)
            made += self._opening(self._block)
        self._block.text += text
        self._said[kind] += 1 if call else len(text)
        return [*made, self._piece(self._block, text)] if text else made

    def _close(self, cut: bool = False) -> Events:
        """The events that end the block that is open; a limit may have `cut` it."""
        block, self._block = self._block, None
        return self._closing(block, cut) if block else []

    @abstractmethod
    def _beginning(self, prompt_tokens: int) -> Events: ...

    @abstractmethod
    def _opening(self, block: Block) -> Events: ...

    @abstractmethod
    def _piece(self, block: Block, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _closing(self, block: Block, cut: bool) -> Events:
        """The events that end a block, which goes to `_blocks`."""

    @abstractmethod
    def _ended(self, result: AnyCompletion, choice: Choice) -> Events:
        """The last events; the whole goes to `_result`."""
