"""A name or value that is unknown is answered with the known one that is most like it, and no validator's own words."""

from pathlib import Path

import pytest
from pydantic import BaseModel, field_validator

from espalier.engine.errors import CheckpointError, EspalierError, InvalidRequestError, nearest, nearest_of_each
from espalier.engine.models.hub import locate, require_name
from espalier.prm.families.spec import read_spec
from espalier.search.request import SearchRequest
from espalier.search.rules import read_step_rule
from espalier.search.run.load import resolve_dtype
from espalier.search.run.settings import RuntimeSettings
from espalier.search.schema import from_values
from espalier.search.service.http_api.body import validated
from espalier.search.service.http_api.openai.bodies import ChatBody, not_honoured
from espalier.search.service.kserve.endpoints import GenerateBody, _unknown
from espalier.search.service.model_names import ModelNames, UnknownModelError


@pytest.mark.parametrize(
    ("word", "known", "hint"),
    [
        ("beem_width", ("beam_width", "expansion"), "; did you mean 'beam_width'?"),
        ("Beam-Width", ("beam_width",), "; did you mean 'beam_width'?"),
        ("MAJORITY", ("majority",), "; did you mean 'majority'?"),
        ("zzz", ("beam_width",), ""),
        (17, ("beam_width",), ""),
        ("beam_width" * 99_999, ("beam_width",), ""),  # no time is spent on it
        ("x", (), ""),
    ],
)
def test_the_nearest_of_known_names_is_named(word: object, known: tuple[str, ...], hint: str):
    assert nearest(word, known) == hint


def test_each_of_several_unknown_names_has_its_own_hint():
    assert nearest_of_each(["beem"], ["beam"]) == "beem; did you mean 'beam'?"
    assert nearest_of_each(["beem", "q", "dvst"], ["beam", "dvts"]) == (
        "beem (did you mean 'beam'?), q, dvst (did you mean 'dvts'?)"
    )
    assert nearest_of_each([*"abcdefghij"], ["beam"]).endswith("h and 2 more")


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (SearchRequest, {"problem": "?", "beam_with": 4}, "beam_with: is unknown; did you mean 'beam_width'?"),
        (SearchRequest, {"problem": "?", "algorithm": "bean"}, "is 'bean'; did you mean 'beam'?"),
        (SearchRequest, {"problem": "?", "vote": "wheighted"}, "is 'wheighted'; did you mean 'weighted'?"),
        (SearchRequest, {"problem": "?", "history": [{"role": "usr", "content": "x"}]}, "did you mean 'user'?"),
        (RuntimeSettings, {"generater": "x"}, "generater: is unknown; did you mean 'generator'?"),
        (RuntimeSettings, {"load_format": "safetensor"}, "did you mean 'safetensors'?"),
    ],
)
def test_fields_and_values_in_python_json_and_files(kind: type, values: dict[str, object], said: str):
    with pytest.raises(InvalidRequestError) as caught:
        from_values(kind, values)
    assert said in str(caught.value)


def test_many_unknown_fields_cost_no_more_than_a_few():
    with pytest.raises(InvalidRequestError) as caught:
        from_values(SearchRequest, {f"beam_widt{i}": i for i in range(100_000)})
    assert "and 99984 more like it" in str(caught.value)


def test_names_of_models_and_devices(tmp_path: Path):
    with pytest.raises(CheckpointError, match="did you mean 'demo-generator'"):
        locate("demo-genrator")
    (tmp_path / "small.gguf").touch()
    with pytest.raises(CheckpointError, match=r"did you mean 'small\.gguf'"):
        require_name(f"{tmp_path}/smal.gguf")
    with pytest.raises(CheckpointError, match=r"unknown dtype 'bfloat15'.*did you mean 'bfloat16'"):
        resolve_dtype("bfloat15", "cpu")
    for name, near in (("demo@beem-n4-m4", "demo@beam-n4-m4"), ("dem", "demo"), ("demo@planin", "demo@plain")):
        with pytest.raises(UnknownModelError, match=f"did you mean '{near}'"):
            ModelNames("demo", 0).search_fields(name)
    with pytest.raises(ValueError, match="did you mean 'paragraph'"):
        read_step_rule("paragraf")


def test_names_in_bodies_of_other_protocols():
    found = [str(wrong.description) for wrong in not_honoured({"temprature": 1}, {"temperature", "seed"})]
    assert found == ["is unknown; did you mean 'temperature'?"]
    (wrong,) = _unknown(GenerateBody.model_validate({"text_input": "x", "paramters": {}}), "is unknown", "outputs.")
    assert (wrong.field, wrong.description) == ("outputs.paramters", "is unknown; did you mean 'parameters'?")


class _Body(BaseModel, extra="forbid"):
    size: int = 0

    @field_validator("size")
    @classmethod
    def _even(cls, size: int) -> int:
        assert size < 100, "must be small"
        if size % 2:
            raise ValueError("must be even")
        return size


def test_messages_hold_no_words_of_the_validator():
    for body, said in (({"size": 3}, "size: must be even"), ({"size": 100}, "size: must be small")):
        with pytest.raises(InvalidRequestError) as caught:
            validated(_Body, body)
        assert str(caught.value).startswith(said)
    with pytest.raises(InvalidRequestError, match=r"^siz: is unknown$"):
        validated(_Body, {"siz": 2})
    with pytest.raises(InvalidRequestError) as caught:
        validated(ChatBody, {"model": "m", "messages": [], "stream": "yes"})
    assert "Input should" not in str(caught.value)


def test_keys_and_values_of_a_family_spec(tmp_path: Path):
    file = tmp_path / "mine.toml"
    texts = {
        "architectres = []": "architectures",
        "[prompt]\nkind = 'chta'": "chat",
        "[head]\noutput = 'sigmod'": "sigmoid",
    }
    for text, near in texts.items():
        file.write_text(f"name = 'mine'\n{text}\n[step]\ntag = '<t>'\n")
        with pytest.raises(EspalierError, match=f"did you mean '{near}'"):
            read_spec(file)
