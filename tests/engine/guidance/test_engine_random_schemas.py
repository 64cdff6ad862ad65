"""Random JSON schemas: most are accepted, the others refused by keyword, and what is finished is valid."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from engine_driver import drain, release
from json_schemas import RandomSchemas

from espalier.engine.engine import Engine
from espalier.engine.guidance.compiled import GrammarCompiler
from espalier.engine.guidance.grammar import GrammarError, json_grammar
from espalier.engine.guidance.matcher import Matcher
from espalier.engine.models.model import Model
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Generate, Generated, Sampling, StopCause

jsonschema = pytest.importorskip("jsonschema")
TOGETHER = 32


@dataclass
class Tally:
    """Schemas by their fate, and texts by how they ended."""

    schemas: Counter[str]
    texts: Counter[str]


def started(compiler: GrammarCompiler, schema: dict[str, Any]) -> tuple[Matcher | None, str]:
    """A matcher of a schema's texts, or the reason why there is none."""
    try:
        return compiler._compile(json_grammar(schema)), ""
    except GrammarError as error:
        return None, str(error)


def tally(count: int, seed: int, model: Model, engine: Engine) -> Tally:
    """Sample a text of each of `count` schemas, many at a time; each must be valid, or cut at its limit."""
    schemas, compiler, found = RandomSchemas(seed), GrammarCompiler(model), Tally(Counter(), Counter())
    waiting = []
    for number in range(count):
        schema, unsupported = schemas.draw()
        jsonschema.Draft202012Validator.check_schema(schema)
        matcher, refusal = started(compiler, schema)
        assert bool(refusal) == bool(unsupported), (schema, refusal)
        assert unsupported in refusal
        found.schemas["accepted" if matcher else "refused"] += 1
        if matcher:
            sequence = engine.open(GENERATOR, [5 + number % 40, 7, 9])
            sampling = Sampling(temperature=1.5, key=number)
            waiting.append(Generate(number, sequence, (sampling,), 120, "", in_place=True, matcher=matcher, tag=schema))
        if waiting and (len(waiting) == TOGETHER or number == count - 1):
            for work in waiting:
                engine.submit(work)
            for done in drain(engine):
                assert isinstance(done, Generated)
                found.texts[done.cause] += 1
                assert done.cause in (StopCause.EOS, StopCause.LENGTH), (
                    done.work.tag,
                    done.matcher and done.matcher.error,
                )
                if done.cause is StopCause.EOS:
                    jsonschema.Draft202012Validator(done.work.tag).validate(json.loads(done.text))
                release(engine, done.sequence)
            waiting = []
    return found


def test_texts_of_random_schemas_are_valid(load_model: Callable[[str], Model], make_engine: Callable[..., Engine]):
    model = load_model("talker")
    found = tally(30, 1, model, make_engine(model, kv_memory_bytes=2**23))
    assert found.schemas["accepted"] >= 24
    assert found.schemas["refused"] >= 1
    assert found.texts[StopCause.EOS] >= 15


@pytest.mark.slow
def test_texts_of_a_thousand_random_schemas_are_valid(
    load_model: Callable[[str], Model], make_engine: Callable[..., Engine]
):
    model = load_model("talker")
    found = tally(1000, 0, model, make_engine(model, kv_memory_bytes=2**23))
    print(found)
    assert found.schemas["accepted"] >= 800
    assert found.texts[StopCause.EOS] >= 0.9 * found.schemas["accepted"]
