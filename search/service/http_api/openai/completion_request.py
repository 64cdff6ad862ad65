"""Bodies of `/v1/completions`: prompts that are continued by plain sampling."""

from typing import Any

from pydantic import BaseModel, InstanceOf, StrictBool

from espalier.engine.errors import Violation
from espalier.search.completion import MAX_PROMPTS, Prompt
from espalier.search.service.http_api.body import validated
from espalier.search.service.http_api.openai.guided import FORM_PARAMETERS
from espalier.search.service.http_api.openai.parameters import (
    PLAIN_PARAMETERS,
    PlainCall,
    StreamOptions,
    not_honoured,
    plain_call,
    plain_fields,
)
from espalier.search.service.model_names import ModelNames

_DEFAULT_TOKENS = 16
"""`max_tokens` of the OpenAI API for this endpoint."""


class CompletionBody(BaseModel, extra="allow"):
    """The body; sampling parameters are checked with the request."""

    model: InstanceOf[str]
    prompt: Any
    echo: StrictBool | None = None
    logprobs: Any = None
    add_special_tokens: StrictBool | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: StrictBool | None = None
    return_tokens_as_token_ids: StrictBool | None = None
    espalier: dict[str, Any] | None = None


_KNOWN = {*CompletionBody.model_fields, *PLAIN_PARAMETERS, *FORM_PARAMETERS, "stop"} - {"max_completion_tokens"}


def read_completion(body: dict[str, Any], names: ModelNames) -> PlainCall:
    """Read a body.

    Raises:
        UnknownModelError: there is no such model.
        InvalidRequestError: its name says a search; or lists everything that is wrong with the body itself.
    """
    its = validated(CompletionBody, body)
    names.require_plain(its.model)
    values, places, found = plain_fields({**body, "max_completion_tokens": None})
    found += not_honoured(body, _KNOWN)
    values |= {"max_tokens": values.get("max_tokens", _DEFAULT_TOKENS), "echo": bool(its.echo)}
    values["add_special_tokens"] = its.add_special_tokens is not False
    values["prompts"], places["prompts"] = _prompts(its.prompt, found), "prompt"
    if isinstance(its.logprobs, bool):  # some clients send the chat's parameter
        values["logprobs"] = 0 if its.logprobs else None
    else:
        values["logprobs"] = its.logprobs
    return plain_call(its.model, body, values, places, found)


def _prompts(value: Any, found: list[Violation]) -> tuple[Prompt, ...]:
    """A text, token ids, or a list of several of either."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and len(value) >= 1:
        if all(map(_is_id, value)):
            return (tuple(value),)
        if len(value) > MAX_PROMPTS:
            found.append(Violation("prompts", f"must be at most {MAX_PROMPTS} prompts, are {len(value)}"))
            return ("-",)
        if all(isinstance(each, str) for each in value):
            return tuple(value)
        if all(isinstance(each, list) and all(map(_is_id, each)) for each in value):
            return tuple(map(tuple, value))
    found.append(Violation("prompts", "must be a text, a list of token ids, or a list of several of either"))
    return ("-",)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
