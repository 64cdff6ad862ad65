"""Random JSON schemas: most of keywords that guided decoding has, some with one that it has not."""

import random
from functools import partial
from typing import Any

UNSUPPORTED: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "not": {"type": "integer", "not": {"const": 3}},
    "if": {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
}
_PATTERNS = ("^[a-z]{2,5}$", "^\\d{3}-\\d{2}$", "^(on|off)$", "^[A-Z][a-z]*$")
_FORMATS = ("date", "time", "date-time", "ipv4", "uuid", "email")
_NAMES = ("id", "name", "kind", "items", "at", "x", "y", "note", "größe", 'a "b"')


class RandomSchemas:
    """Schemas drawn one after the other; the same from the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self, unsupported: float = 0.12) -> tuple[dict[str, Any], str]:
        """A schema, and the keyword in it that is not supported, for that share of them; empty for none."""
        if self._random.random() >= unsupported:
            whole = self._with_definitions() if self._random.random() < 0.1 else self._schema(3)
            return whole, ""
        keyword = self._random.choice(list(UNSUPPORTED))
        return self._around(UNSUPPORTED[keyword]), keyword

    def _around(self, inner: dict[str, Any]) -> dict[str, Any]:
        match self._random.randrange(3):
            case 0:
                return inner
            case 1:
                return {"type": "array", "items": inner, "minItems": 1, "maxItems": 2}
            case _:
                return self._object({"id": inner}, ["id"])

    def _schema(self, depth: int) -> dict[str, Any]:
        kinds = [self._string, self._number, self._integer, self._enum, self._simple]
        if depth:
            kinds += [partial(kind, depth - 1) for kind in (self._array, self._record, self._any_of)] * 2
        return self._random.choice(kinds)()

    def _string(self) -> dict[str, Any]:
        match self._random.randrange(3):
            case 0:
                low = self._random.randrange(3)
                return {"type": "string", "minLength": low, "maxLength": low + self._random.randrange(6)}
            case 1:
                return {"type": "string", "pattern": self._random.choice(_PATTERNS)}
            case _:
                return {"type": "string", "format": self._random.choice(_FORMATS)}

    def _integer(self) -> dict[str, Any]:
        low = self._random.randrange(-50, 50)
        bounds = {"minimum": low, "maximum": low + self._random.randrange(1, 2000)}
        if self._random.random() < 0.2:
            return {"type": "integer", "multipleOf": self._random.choice((2, 5, 12)), **bounds}
        return {"type": "integer", **bounds}

    def _number(self) -> dict[str, Any]:
        low = self._random.randrange(-20, 20) / 4
        return {"type": "number", self._random.choice(("minimum", "exclusiveMinimum")): low, "maximum": low + 7.5}

    def _enum(self) -> dict[str, Any]:
        values = [1, -2.5, "red", "a\nb", None, True, [1, "x"], {"k": 1}]
        if self._random.random() < 0.3:
            return {"const": self._random.choice(values)}
        return {"enum": self._random.sample(values, self._random.randrange(1, 5))}

    def _simple(self) -> dict[str, Any]:
        return {"type": self._random.choice(("boolean", "null", ["boolean", "null"], ["integer", "null"]))}

    def _array(self, depth: int) -> dict[str, Any]:
        low = self._random.randrange(3)
        array = {"type": "array", "minItems": low, "maxItems": low + self._random.randrange(3)}
        if self._random.random() < 0.25:
            return {**array, "prefixItems": [self._schema(depth), self._schema(0)], "items": self._schema(0)}
        return {**array, "items": self._schema(depth)}

    def _record(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(_NAMES, self._random.randrange(1, 5))
        required = [name for name in names if self._random.random() < 0.6]
        return self._object({name: self._schema(depth) for name in names}, required)

    def _object(self, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
        more = self._random.choice((False, False, False, {"type": "integer", "minimum": 0, "maximum": 9}))
        made = {"type": "object", "properties": properties, "required": required, "additionalProperties": more}
        if self._random.random() < 0.1:
            made["patternProperties"] = {"^p_[a-z]$": {"type": "boolean"}}
        return made

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._schema(depth) for _ in range(self._random.randrange(2, 4))]}

    def _with_definitions(self) -> dict[str, Any]:
        """A schema as a whole, whose definitions are found from its root."""
        part = {"$ref": "#/$defs/part"}
        return {**self._object({"a": part, "b": part}, ["a"]), "$defs": {"part": self._schema(0)}}
