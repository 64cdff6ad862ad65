"""Every causal model type that transformers registers, small and random, over the engine's KV: equal, or refused."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_driver import drain, read, release
from tiny_models import train_tokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from zoo_models import GIVEN, ODD

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import load_generator
from espalier.engine.models.options import ModelImpl, Quantization
from espalier.engine.models.zoo.calls import NotRunnableError
from espalier.engine.models.zoo.description import quietly, register
from espalier.engine.models.zoo.small import make_small
from espalier.engine.models.zoo.trial import random_model, require_runnable
from espalier.engine.work import Score, Scored

PAGE = Path(__file__).resolve().parents[3] / "engine/models/zoo/MODELS.md"
UPDATE = "ESPALIER_UPDATE_MODELS"
"""Set it to have the page written, instead of compared with what was found."""
LEAST_EQUAL = 83
LEAST_COSINE = 0.94
"""Of logits in int8. Weights four times as large as a new model's magnify each rounding, and experts that were never
trained score so alike that it sends tokens to others: of all types but two it is above 0.98."""
LEAST_COSINE_OF = {"mamba": 0.9}
"""Of types whose random models magnify rounding more than others."""


@pytest.mark.slow
def test_every_registered_decoder_equals_transformers_or_is_refused_with_the_reason(tmp_path: Path):
    torch.set_num_threads(1)
    register()
    train_tokenizer().save_pretrained(tmp_path / "tokenizer")
    equal, refused, wrong = list[str](), dict[str, str](), dict[str, str]()
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            model, folder = written(kind, tmp_path)
            difference, cosine = difference_of(model, folder), cosine_in_int8(model, folder)
        except NotRunnableError as error:
            refused[kind] = reason_of(str(error))
        except Exception as error:
            wrong[kind] = f"{type(error).__name__}: {error}"
        else:
            equal.append(kind)
            if not difference < 1e-4:
                wrong[kind] = f"it was let in, and differs by {difference:.0e}"
            if not cosine > LEAST_COSINE_OF.get(kind, LEAST_COSINE):
                wrong[kind] = f"in int8 the cosine of its logits is {cosine:.4f}"
    assert wrong == {}
    page = rendered(sorted(equal), refused)
    if os.environ.get(UPDATE):
        PAGE.write_text(page, encoding="utf-8")
    assert len(equal) >= LEAST_EQUAL
    assert PAGE.read_text(encoding="utf-8") == page


def written(kind: str, root: Path) -> tuple[Any, Path]:
    """A small random model of a type, and its checkpoint.

    Raises:
        NotRunnableError: it does not run on the engine's attention.
    """
    try:
        config = transformers.CONFIG_MAPPING[kind](**GIVEN.get(kind, {})).get_text_config(decoder=True)
    except Exception as error:
        raise NotRunnableError("transformers refuses its default configuration") from error
    mapping: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise NotRunnableError("transformers has no language model for its text half")
    found = mapping[type(config)]
    model_class = found[0] if isinstance(found, tuple) else found
    with quietly():
        require_runnable(model_class, lambda: make_small(config))
        model = random_model(model_class, make_small(config, ODD))
        folder = root / kind
        model.save_pretrained(folder)
    for file in (root / "tokenizer").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    model.set_attn_implementation("eager")
    return model, folder


def difference_of(model: Any, folder: Path) -> float:
    """The largest difference of an engine's logits from transformers', relative to the largest logit."""
    loaded = load_generator(Checkpoint(folder, model_impl=ModelImpl.TRANSFORMERS), torch.float32, "cpu")
    engine = Engine({"generator": loaded}, EngineSettings(2**23, 4, max_batch_tokens=7))
    differences = list(differences_of(engine, model))
    engine.check_drained()
    return max(differences)


def cosine_in_int8(model: Any, folder: Path) -> float:
    """The cosine of an engine's logits with weights in int8, with those of float32."""
    checkpoint = Checkpoint(folder, quantization=Quantization.INT8, model_impl=ModelImpl.TRANSFORMERS)
    engine = Engine({"generator": load_generator(checkpoint, torch.float32, "cpu")}, EngineSettings(2**23, 4))
    ids = np.random.default_rng(1).integers(4, 330, 26).tolist()
    sequence = engine.open("generator", [])
    found = torch.from_numpy(read(engine, sequence, ids))
    release(engine, sequence)
    engine.check_drained()
    with torch.inference_mode():
        exact = model(torch.tensor([ids]), use_cache=False).logits[0]
    return float(torch.cosine_similarity(found.flatten(), exact.flatten(), dim=0))


def differences_of(engine: Engine, model: Any) -> Iterator[float]:
    """After prefill in chunks, of forks that continue each on its own, and token by token."""
    random = np.random.default_rng(0)
    ids = random.integers(4, 330, 26).tolist()
    parent = engine.open("generator", [])
    yield difference(read(engine, parent, ids), model, ids)
    family = [*engine.fork(parent, 2), parent]
    tails = [random.integers(4, 330, count).tolist() for count in (1, 5, 9)]
    for sequence, tail in zip(family, tails, strict=True):
        engine.submit(Score("reader", sequence, tuple(tail), tuple(range(len(tail)))))
    values = {done.work.sequence.row: done.values for done in drain(engine) if isinstance(done, Scored)}
    for sequence, tail in zip(family, tails, strict=True):
        yield difference(values[sequence.row], model, ids + tail)
    for token in (7, 8):
        tails[0].append(token)
        yield difference(read(engine, family[0], [token]), model, ids + tails[0])
    release(engine, *family)


def difference(logits: np.ndarray, model: Any, token_ids: list[int]) -> float:
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids]), use_cache=False).logits[0, -len(logits) :]
    return float((torch.from_numpy(logits) - expected).abs().max() / expected.abs().max())


def reason_of(text: str) -> str:
    """The reason of a refusal, without what differs from machine to machine."""
    return re.sub(r" \((logits differ|\w+Error).*", "", text)


def rendered(equal: list[str], refused: dict[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for kind, reason in refused.items():
        by_reason.setdefault(reason, []).append(kind)
    rows = [f"| {reason} | {', '.join(sorted(kinds))} |" for reason, kinds in sorted(by_reason.items())]
    return "\n".join(
        [
            "# Model types of transformers that run",
            "",
            f"Of the {len(equal) + len(refused)} causal model types of transformers {transformers.__version__}, each",
            "as a small random checkpoint in odd shapes: prefill in odd chunks, forks and decoding over the KV pool,",
            "against the model's own plain forward, at 1e-4, and in int8 on a CPU. Windows are shorter than the texts.",
            "`make test-slow` compares this page with what it finds.",
            "",
            f"**Equal: {len(equal)}.** {', '.join(equal)}.",
            "",
            "A checkpoint may have what its type's defaults have not, such as recurrent layers: each is tried at load.",
            "",
            f"**Refused: {len(refused)}**, with the reason:",
            "",
            "| its class … | model types |",
            "|---|---|",
            *rows,
            "",
        ]
    )
