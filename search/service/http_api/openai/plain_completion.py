"""Results of plain sampling as the OpenAI API has them: chat completions and text completions, whole or in chunks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from espalier.search.completion import Choice, CompletionResult, ReadPrompt, TextSampled, TokenLogprob
from espalier.search.result import Finished
from espalier.search.service.http_api.openai.completion import reasoning, token_counts
from espalier.search.service.http_api.openai.parameters import PlainCall


@dataclass(slots=True)
class PlainCompletion:
    """One completion, of `/v1/completions`, or of a chat if `chat` is set.

    Attributes:
        search_id: the server's name for it.
        call: what was asked for.
        created: when it began, in seconds since 1970.
        chat: whether it answers a conversation.
    """

    search_id: str
    call: PlainCall
    created: int
    chat: bool
    _offsets: dict[int, int] = field(default_factory=dict[int, int])  # characters of tokens sent, by choice
    _read: dict[int, int] = field(default_factory=dict[int, int])  # tokens, by prompt
    _sampled: int = 0  # tokens until now

    def whole(self, result: CompletionResult) -> dict[str, Any]:
        """The completion of a result."""
        make = self._chat_choice if self.chat else self._text_choice
        body = {
            **self._head(""),
            "choices": [make(choice, result.prompts[choice.prompt]) for choice in result.choices],
            "usage": usage_of(result),
            "espalier": espalier_of(result),
        }
        if self.chat and self.call.return_token_ids:
            body["prompt_token_ids"] = result.prompts[0].token_ids
        return body

    def events(self, event: TextSampled | Finished[CompletionResult]) -> list[dict[str, Any]]:
        """The chunks of an event."""
        return self._last_chunk(event.result) if isinstance(event, Finished) else self._chunks(event)

    def _chunks(self, event: TextSampled) -> list[dict[str, Any]]:
        """The chunks of new text: of a chat one with the role first."""
        self._sampled += len(event.token_ids)
        if event.prompt:
            self._read[event.index // self.call.request.samples] = len(event.prompt.token_ids)
        reason = _finish_reason(event.finish_reason)
        ids = {"token_ids": event.token_ids} if self.call.return_token_ids else {}
        if self.chat:
            first = [self._chunk({"index": event.index, "delta": {"role": "assistant", "content": ""}})]
            logprobs = self._chat_logprobs(event.logprobs)
            delta = reasoning(event.thought * self.call.thoughts)
            if event.text or not (reason or delta):
                delta["content"] = event.text
            choice = {"index": event.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason, **ids}
            return [*(first if event.prompt else []), self._chunk(choice)]
        text, logprobs = event.text, event.logprobs
        offset = self._offsets.get(event.index, 0)
        if event.prompt and self.call.request.echo:
            text, logprobs = event.prompt.text + text, (*event.prompt.logprobs, *logprobs)
        self._offsets[event.index] = offset + sum(map(_length, logprobs))
        if event.prompt and self.call.return_token_ids:
            ids["prompt_token_ids"] = event.prompt.token_ids
        told = self._text_logprobs(logprobs, offset)
        return [self._chunk({"index": event.index, "text": text, "logprobs": told, "finish_reason": reason, **ids})]

    def _last_chunk(self, result: CompletionResult) -> list[dict[str, Any]]:
        """The chunk after the last text: the usage, if it is wanted."""
        if not self.call.include_usage:
            return []
        told = {"usage": usage_of(result), "espalier": espalier_of(result)}
        return [{**self._head(".chunk" * self.chat), "choices": [], **told}]

    def _chunk(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self.call.include_usage else {}
        if self.call.usage_so_far:
            usage = {"usage": token_counts(sum(self._read.values()), self._sampled)}
        own = {"espalier": {"seed": self.call.request.seed}} if choice.get("finish_reason") else {}
        choice = {"logprobs": None, "finish_reason": None, **choice}
        return {**self._head(".chunk" * self.chat), "choices": [choice], **usage, **own}

    def _chat_choice(self, choice: Choice, prompt: ReadPrompt) -> dict[str, Any]:
        message = {
            "role": "assistant",
            "content": choice.text,
            **reasoning(choice.thought * self.call.thoughts),
            "refusal": None,
        }
        ids = {"token_ids": choice.token_ids} if self.call.return_token_ids else {}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._chat_logprobs(choice.logprobs),
            "finish_reason": _finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_text,
            **ids,
        }

    def _text_choice(self, choice: Choice, prompt: ReadPrompt) -> dict[str, Any]:
        text, logprobs = choice.text, choice.logprobs
        if self.call.request.echo:
            text, logprobs = prompt.text + text, (*prompt.logprobs, *logprobs)
        ids = {"token_ids": choice.token_ids, "prompt_token_ids": prompt.token_ids}
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._text_logprobs(logprobs),
            "finish_reason": _finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_text,
            **(ids if self.call.return_token_ids else {}),
        }

    def _chat_logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.call.request.logprobs is None:
            return None

        def entry(token: TokenLogprob) -> dict[str, Any]:
            return {"token": self._name(token), "logprob": token.logprob, "bytes": list(token.raw)}

        return {
            "content": [{**entry(token), "top_logprobs": [entry(each) for each in token.top]} for token in tokens],
            "refusal": None,
        }

    def _text_logprobs(self, tokens: Sequence[TokenLogprob], offset: int = 0) -> dict[str, Any] | None:
        """Tokens with their log-probabilities; the likeliest of each place, and always the one that is there."""
        if self.call.request.logprobs is None:
            return None
        offsets: list[int] = []
        for token in tokens:
            offsets.append(offset)
            offset += _length(token)
        return {
            "text_offset": offsets,
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [None if token.logprob is None else self._by_name((*token.top, token)) for token in tokens],
        }

    def _by_name(self, tokens: Iterable[TokenLogprob]) -> dict[str, float | None]:
        return {self._name(token): token.logprob for token in tokens}

    def _name(self, token: TokenLogprob) -> str:
        """A token's text; its bytes where they are no whole character, so that no two tokens have one name."""
        if self.call.tokens_as_ids:
            return f"token_id:{token.token_id}"
        try:
            token.raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)
        return token.token

    def _head(self, suffix: str) -> dict[str, Any]:
        kind, name = ("chat.completion", "chatcmpl") if self.chat else ("text_completion", "cmpl")
        head = {"id": f"{name}-{self.search_id}", "object": kind + suffix}
        return {**head, "created": self.created, "model": self.call.model}


def usage_of(result: CompletionResult) -> dict[str, Any]:
    """Tokens as the OpenAI API counts them."""
    usage = token_counts(result.usage.prompt_tokens, result.completion_tokens)
    if thought := sum(choice.thought_tokens for choice in result.choices):
        usage["completion_tokens_details"] = {"reasoning_tokens": thought}
    return usage


def espalier_of(result: CompletionResult) -> dict[str, Any]:
    """Fields that the OpenAI API has no place for."""
    errors = {choice.index: choice.error for choice in result.choices if choice.error}
    return {
        **({"errors": errors} if errors else {}),
        **({"warnings": result.warnings} if result.warnings else {}),
        "search_id": result.search_id,
        "algorithm": result.configuration.algorithm,
        "seed": result.configuration.seed,
        "stop_reason": result.stop_reason,
        "usage": asdict(result.usage),
    }


def _length(token: TokenLogprob) -> int:
    """Characters of a token; those that it shares with its neighbours are left out."""
    return len(token.raw.decode(errors="ignore"))


def _finish_reason(reason: str | None) -> str | None:
    """`length` also for a choice that was cut from outside, as the OpenAI API has no other word for it."""
    return "length" if reason == "abort" else reason
