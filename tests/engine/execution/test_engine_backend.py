"""An engine knows of a device what its backend offers: another backend takes over every operation."""

import ast
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import drain, release

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.models import decoder
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.engine.work import Generate, Generated, Sampling, Score, Scored
from espalier.kernels.attention import Attend
from espalier.kernels.layers import Layers
from espalier.kernels.layout import KVLayout
from espalier.kernels.linear import Linear
from espalier.kernels.torch_backend import TorchBackend
from espalier.prm.families import load_verifier

ROOT = Path(__file__).resolve().parents[3]
CALLS: Counter[str] = Counter()
"""How often each operation was asked for."""


class CountingLayout(KVLayout):
    def layer_view(self, *args: Any, **kwargs: Any) -> Any:
        CALLS["layer views"] += 1
        return super().layer_view(*args, **kwargs)


class CountingLinear(Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        CALLS["products"] += 1
        return super().__call__(x)


class CountingBackend(TorchBackend):
    layout = CountingLayout

    def prepare_layers(self, *args: Any, **kwargs: Any) -> Layers:
        layers: Any = super().prepare_layers(*args, **kwargs)
        forward = layers.forward
        layers.forward = lambda *step: (CALLS.update(["steps"]), forward(*step))[1]
        return layers

    def prepare_attention(self, *args: Any, **kwargs: Any) -> Attend:
        attend: Any = super().prepare_attention(*args, **kwargs)

        def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
            CALLS["attention"] += 1
            return attend(*args, **kwargs)

        return counted

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return CountingLinear(weight, bias)

    def copy_blocks(self, *blocks: Any) -> None:
        CALLS["copies"] += 1
        super().copy_blocks(*blocks)

    def filter_logits(self, *rows: Any) -> torch.Tensor:
        CALLS["filters"] += 1
        return super().filter_logits(*rows)

    def draw_tokens(self, *rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        CALLS["draws"] += 1
        return super().draw_tokens(*rows)

    def set_threads(self, count: int | None) -> None:
        CALLS[f"{count} threads"] += 1


@pytest.fixture
def load(tiny_checkpoints: dict[str, Path]) -> Callable[[], dict[str, Model]]:
    def load() -> dict[str, Model]:
        generator, verifier = (Checkpoint(tiny_checkpoints[name]) for name in ("qwen2-untied", "classifier"))
        family = load_verifier(verifier, torch.float32, "cpu")
        return {GENERATOR: load_generator(generator, torch.float32, "cpu"), VERIFIER: family.model}

    return load


def run(models: dict[str, Model]) -> tuple[list[tuple[int, ...]], torch.Tensor]:
    """Tokens of two children that part from a half full block, and scores of some tokens."""
    engine = Engine(models, EngineSettings(2**21, 4))
    engine.set_threads(None)
    generator, verifier = (engine.open(role, list(range(20, 30)), owner="search") for role in models)
    samplings = tuple(Sampling(temperature=3.0, top_k=50, key=key) for key in range(2))
    engine.submit(Generate("search", generator, samplings, 5, ""))
    engine.submit(Score("search", verifier, (7, 8, 9), (0, 2)))
    done = drain(engine)
    children = sorted((d for d in done if isinstance(d, Generated)), key=lambda d: d.indices)
    (scored,) = (d for d in done if isinstance(d, Scored))
    steps = sum(role.steps for role in engine.stats().values())
    assert CALLS["steps"] in (0, steps)
    release(engine, generator, verifier, *(child.sequence for child in children))
    engine.check_drained()
    return [tuple(child.token_ids) for child in children], torch.from_numpy(scored.values)


def test_another_backend_takes_over_layers_attention_products_copies_and_draws(
    load: Callable[[], dict[str, Model]], monkeypatch: pytest.MonkeyPatch
):
    tokens, scores = run(load())
    CALLS.clear()
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "choose_backend", lambda *_: CountingBackend())
        models = load()
    others, other_scores = run(models)
    assert others == tokens
    torch.testing.assert_close(other_scores, scores, rtol=1e-4, atol=1e-5)
    layers = {role: model.config.num_layers for role, model in models.items()}
    generated = CALLS["draws"]
    assert CALLS["filters"] == generated == 5
    assert CALLS["steps"] == generated + 1, "the verifier's tokens are one step"
    assert CALLS["attention"] == generated * layers[GENERATOR] + layers[VERIFIER]
    assert CALLS["layer views"] == sum(layers.values())
    assert CALLS["products"] > generated, "of both heads"
    assert CALLS["copies"] >= 1
    assert CALLS["None threads"] == 2


def kernel_imports(path: Path) -> set[str]:
    """What a file takes from `kernels`, as `module.name`."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return {
        f"{node.module}.{alias.name}".removeprefix("espalier.kernels.")
        for node in imports
        if (node.module or "").startswith("espalier.kernels")
        for alias in node.names
    }


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


def test_the_layers_above_take_nothing_that_computes_from_kernels_but_a_backend():
    described = {
        *(
            "backend.Backend",
            "layers.Layers",
            "linear.Linear",
            "linear.GroupedLinear",
            "linear.QuantizedPacker",
            "layout.AttentionBatch",
        ),
        *("layout.KVLayout", "layout.KVShape", "layout.kv_groups", "layout.LayerKV", "layout.Layout"),
        *("layout.StateLayout", "layout.StateShape", "layout.state_bytes", "recurrent.StateRows", "layout.StateBatch"),
        *(
            "attention.Attend",
            "attention.Terms",
            "layout.StepBatch",
            "attention.Call",
            "attention.CallSteps",
            "attention.StepCalls",
        ),
        *("layers.DecoderSpec", "layers.LayerWeights", "layers.EmbeddingAndNorm", "layers.UnsupportedShapeError"),
        "layers.RECORDED_WITHOUT",
        *("layers.Activation", "linear.Kept", "rotary.ROPE_TYPES", "rotary.Rotary", "sampling.FILTERED"),
        *("sampling.Filters", "sampling.TokenPenalties"),
        "cpu.gguf_blocks.expand",  # files are read by the host, whatever the device
    }
    found = {path.relative_to(ROOT).as_posix(): kernel_imports(path) for path in sources("engine", "prm", "search")}
    taken = {name: imported - described for name, imported in found.items() if imported - described}
    tried = tuple(f"engine/models/zoo/{name}.py" for name in ("trial", "description", "pointwise"))  # on any device
    reference = {name: {"torch_backend.TorchBackend"} for name in tried}
    assert taken == {"engine/models/decoder.py": {"backend.choose_backend"}} | reference
    made = [str(path) for path in sources("engine", "prm") if re.search(r"\b(?<!nn\.)Linear\(", path.read_text())]
    assert made == []


def test_nothing_but_the_choice_of_a_backend_goes_by_the_kind_of_device():
    found = {
        path.relative_to(ROOT).as_posix()
        for path in sources("kernels", "engine", "prm")
        if re.search(r"\.type (==|!=|in|not)|\.type$|is_cuda|is_cpu", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    # torchao has an int4 product for some devices only, and says so late; a CPU that interprets kernels pins no memory.
    assert found == {"kernels/backend.py", "engine/models/quantization.py", "kernels/triton/steps.py"}
