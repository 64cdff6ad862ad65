"""`/openapi.json`: the routes of the HTTP port and the bodies that they read, in OpenAPI 3.1."""

import inspect
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from pydantic import BaseModel
from starlette.routing import Route

from espalier import __version__
from espalier.search.request import SearchRequest
from espalier.search.schema import declared
from espalier.search.service.http_api.openai.chat_request import ChatBody
from espalier.search.service.http_api.openai.completion_request import CompletionBody
from espalier.search.service.http_api.openai.responses import ResponsesBody
from espalier.search.service.http_api.openai.tokens import DetokenizeBody, TokenizeBody
from espalier.search.service.http_api.reload import ReloadBody
from espalier.search.service.http_api.scores import ScoreBody
from espalier.search.service.kserve.endpoints import GenerateBody, InferBody

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    **dict.fromkeys(("/v1/score", "/score", "/classify", "/pooling"), ScoreBody),
    "/v1/reload": ReloadBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "infer": InferBody,
    "generate": GenerateBody,
    "generate_stream": GenerateBody,
}
"""Bodies by their paths, or by the last part of paths with a model's name."""
_TYPES: dict[type, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}


def openapi_document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the document of `routes`; what an endpoint does is the first line of its docstring."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for route in routes:
        method = "post" if "POST" in (route.methods or ()) else "get"
        operation: dict[str, Any] = {
            "summary": (inspect.getdoc(route.endpoint) or route.path).partition("\n")[0],
            "responses": {"200": {"description": "The answer."}, "default": {"description": "An error object."}},
        }
        if body := _body_of(route.path, schemas):
            reference = {"$ref": f"#/components/schemas/{body}"}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
        paths[route.path.replace(":path", "")] = {method: operation}
    info = {"title": "Espalier", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _body_of(path: str, schemas: dict[str, Any]) -> str:
    """The name of the body that a path reads, whose schema goes to `schemas`; empty for none."""
    if path == "/v1/searches":
        schemas["SearchRequest"] = _search_schema()
        return "SearchRequest"
    if not (body := _BODIES.get(path if "{" not in path else path.rpartition("/")[2])):
        return ""
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs", {}))
    schemas[body.__name__] = schema
    return body.__name__


def _search_schema() -> dict[str, Any]:
    """The schema of a search, from the declarations of its fields."""
    properties: dict[str, Any] = {}
    for field in declared(SearchRequest):
        its: dict[str, Any] = {"type": _TYPES.get(field.kind, "array" if field.item else "string")}
        if isinstance(field.kind, type) and issubclass(field.kind, StrEnum):
            its["enum"] = list(field.kind)
        if field.bounds:
            bounds = {"minimum": field.bounds.ge, "exclusiveMinimum": field.bounds.gt, "maximum": field.bounds.le}
            its |= {name: bound for name, bound in bounds.items() if bound is not None}
        if field.option:
            its["description"] = field.option.help
        properties[field.name] = {"anyOf": [its, {"type": "null"}]} if field.optional else its
    return {"type": "object", "properties": properties, "required": ["problem"]}
