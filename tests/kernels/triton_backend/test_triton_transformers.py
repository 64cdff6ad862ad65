"""Decoders of transformers over kernels for GPUs: numbers in Triton's interpreter, waits on a GPU that is none."""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import drain, generate, read, release
from fake_cuda import FakeCuda
from plain import plain_greedy, plain_logits
from stand_in import StandIn
from zoo_models import GIVEN, ODD, small_config, write_checkpoint, write_model

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import ModelImpl
from espalier.engine.models.zoo import loading
from espalier.engine.models.zoo.layers import TransformersLayers
from espalier.engine.work import Generate, Generated, Sampling, Score, Scored
from espalier.kernels.triton import recording
from espalier.kernels.triton.backend import TritonBackend
from espalier.kernels.triton.plan import Costs
from espalier.kernels.triton.recording import Recorder

KINDS = ["llama", "gemma2", "gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v3"]
"""Windows in some layers, experts, sinks, caps, and values narrower than keys."""
FEW = [
    pytest.param(kind, marks=() if kind in {"gemma2", "gpt_oss", "deepseek_v3"} else pytest.mark.slow) for kind in KINDS
]
"""In every run those that have all of these between them."""
EXPERTS = {"qwen3_moe", "gpt_oss", "deepseek_v3"}
RECURRENT = {"mamba": "scan_channels", "mamba2": "recur_heads", "qwen3_next": "recur_heads"}
"""Without attention, and hybrid, with the kernel of each."""
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("zoo")
    return {kind: write_checkpoint(root / kind, kind) for kind in (*KINDS, *RECURRENT)}


@pytest.fixture
def interpreted(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Model]:
    """Loads a model that computes with the kernels for GPUs, in Triton's interpreter."""

    def load(kind: str, recorder: Recorder | None = None, *, batch_invariant: bool = False) -> Model:
        backend = TritonBackend(Costs(processors=1), recorder, batch_invariant=batch_invariant)
        monkeypatch.setattr(loading, "choose_backend_for", lambda *_: backend)
        return load_generator(Checkpoint(folders[kind], model_impl=ModelImpl.TRANSFORMERS), torch.float32, "cpu")

    return load


LADDER = (1, 2, 4)


@pytest.fixture
def short_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LADDER", LADDER)


def some_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, 330, count).tolist()


def assert_logits_equal(logits: np.ndarray, folder: Path, token_ids: list[int]) -> None:
    expected = plain_logits(folder, token_ids)[-len(logits) :]
    assert (torch.from_numpy(logits) - expected).abs().max() / expected.abs().max() < 1e-5


@pytest.mark.parametrize("kind", [*FEW, *RECURRENT])
def test_prefill_forks_and_decoding_equal_transformers(
    kind: str, make_engine: Callable[..., Engine], interpreted: Callable[..., Model], folders: dict[str, Path]
):
    engine, ids = make_engine(interpreted(kind), max_batch_tokens=16), some_ids(21)
    parent = engine.open("generator", ids[:5])
    assert_logits_equal(read(engine, parent, ids[5:]), folders[kind], ids)
    family, tails = [*engine.fork(parent, 1), parent], [some_ids(count, seed=count) for count in (1, 6)]
    for sequence, tail in zip(family, tails, strict=True):
        engine.submit(Score("reader", sequence, tuple(tail), tuple(range(len(tail)))))
    by_row = {done.work.sequence.row: done.values for done in drain(engine) if isinstance(done, Scored)}
    for sequence, tail in zip(family, tails, strict=True):
        assert_logits_equal(by_row[sequence.row], folders[kind], ids + tail)
    (done,) = generate(engine, parent, GREEDY, tokens=3, delimiter="")
    assert done.token_ids == plain_greedy(folders[kind], ids + tails[1], 3)[0]
    release(engine, *family, done.sequence)


def decode(engine: Engine, prompts: Sequence[list[int]], tokens: int = 3) -> list[tuple[list[int], list[float]]]:
    """Greedy continuations of several prompts at once, with their log-probabilities."""
    sequences = [engine.open("generator", prompt) for prompt in prompts]
    for index, sequence in enumerate(sequences):
        engine.submit(Generate(str(index), sequence, (GREEDY,), tokens, ""))
    done = sorted((d for d in drain(engine) if isinstance(d, Generated)), key=lambda d: str(d.work.owner))
    release(engine, *sequences, *(each.sequence for each in done))
    return [(list(each.token_ids), list(each.log_probabilities)) for each in done]


PROMPTS = [some_ids(3), some_ids(9, seed=1), some_ids(6, seed=2)]
"""Of three sequences, which leave room in the recorded step of four."""


@pytest.mark.parametrize("kind", [*FEW, *RECURRENT])
@pytest.mark.usefixtures("short_ladder")
def test_replayed_steps_give_what_launched_ones_give_bit_by_bit(
    kind: str, make_engine: Callable[..., Engine], interpreted: Callable[..., Model]
):
    recorder = StandIn()
    replayed = decode(make_engine(interpreted(kind, recorder)), PROMPTS)
    assert recorder.recorded == [4, *reversed(LADDER)], "a trial, and the ladder"
    assert recorder.replayed.count(4) > 3, "more than those of the trial"
    assert replayed == decode(make_engine(interpreted(kind)), PROMPTS)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.usefixtures("products_row_by_row")
def test_with_fixed_tiles_attention_and_experts_have_the_same_bits_in_any_company(
    kind: str, make_engine: Callable[..., Engine], interpreted: Callable[..., Model]
):
    model, ids = interpreted(kind, batch_invariant=True), some_ids(9, seed=5)

    def values(company: int) -> np.ndarray:
        engine = make_engine(model, prefix_cache=False)
        others = [engine.open("generator", some_ids(3 + 4 * i, seed=i), owner="others") for i in range(company)]
        for other in others:
            engine.submit(Score("others", other, (5, 6, 7), (2,)))
        sequence = engine.open("generator", ids[:2])
        engine.submit(Score("reader", sequence, tuple(ids[2:]), tuple(range(7))))
        (scored,) = (d for d in drain(engine) if isinstance(d, Scored) and d.work.owner == "reader")
        release(engine, sequence, *others)
        return scored.values

    assert np.array_equal(values(0), values(3))


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    if torch.cuda.is_available():
        pytest.skip("there is a real GPU, which a fake one must not replace")
    with FakeCuda(lambda count: torch.full((count,), 7)).installed() as fake:
        yield fake


@pytest.fixture
def on_fake(cuda: FakeCuda, folders: dict[str, Path]) -> Callable[[str], Model]:
    """Loads a model on the fake GPU."""
    return lambda kind: load_generator(
        Checkpoint(folders[kind], model_impl=ModelImpl.TRANSFORMERS), torch.bfloat16, "cuda"
    )


@pytest.mark.parametrize("kind", [*FEW, *RECURRENT])
@pytest.mark.usefixtures("short_ladder")
def test_steps_wait_for_nothing_but_their_results_and_decode_steps_are_recorded(
    kind: str, cuda: FakeCuda, make_engine: Callable[..., Engine], on_fake: Callable[[str], Model]
):
    engine = make_engine(on_fake(kind))
    assert cuda.counts["graphs"] == 1 + len(LADDER), "that of a trial, too"
    sequences = [engine.open("generator", some_ids(count)) for count in (3, 9)]
    for sequence in sequences:
        engine.submit(Generate("writer", sequence, (GREEDY,), 6, ""))
    with cuda.running() as counted:
        done = drain(engine)
    assert len(done) == 2
    assert counted["blocking"] == 0
    assert counted["replays"] >= 5, "the first of six tokens comes with the prompt"
    expected = {"attend_items", "write_tokens"} if kind not in ("mamba", "mamba2") else set()
    expected |= {"grouped_product"} if kind in EXPERTS else set()
    expected |= {"convolve_tokens", RECURRENT[kind]} if kind in RECURRENT else set()
    assert {launch.kernel for launch in cuda.launched} >= expected
    release(engine, *sequences, *(each.sequence for each in done if isinstance(each, Generated)))


@pytest.mark.usefixtures("short_ladder")
def test_a_recorded_layer_of_llama_is_fourteen_launches(
    cuda: FakeCuda, make_engine: Callable[..., Engine], tmp_path: Path
):
    """Its class's own code makes about 40. A step of four tokens needs no rows to fill it up."""
    found: list[int] = []
    for layers in (2, 3):
        config = small_config("llama")
        config.num_hidden_layers = layers
        checkpoint = Checkpoint(write_model(tmp_path / f"{layers}", config), model_impl=ModelImpl.TRANSFORMERS)
        make_engine(load_generator(checkpoint, torch.bfloat16, "cuda"))
        found.append(cuda.recorded[-len(LADDER)])
    assert found[1] - found[0] == 14


WAITING = {"gemma3n", "gemma3n_text", "jetmoe", "kolibri1", "phimoe"}
"""Types that do in each step what waits for a real device, or what the fake one has not: make a tensor of a number,
read a list of counts, multiply into another dtype, copy frequencies there."""


@pytest.mark.slow
@pytest.mark.usefixtures("short_ladder")
def test_decode_steps_of_every_type_that_runs_are_recorded_and_wait_for_nothing(cuda: FakeCuda, tmp_path: Path):
    page = (Path(__file__).resolve().parents[3] / "engine/models/zoo/MODELS.md").read_text(encoding="utf-8")
    equal = re.search(r"\*\*Equal: \d+\.\*\* (.*)\.", page)
    assert equal
    wrong: dict[str, str] = {}
    for kind in sorted({*equal[1].split(", ")} - WAITING):
        try:
            folder = write_checkpoint(tmp_path / kind, kind, **GIVEN.get(kind, {}))
            model = load_generator(Checkpoint(folder, model_impl=ModelImpl.TRANSFORMERS), torch.bfloat16, "cuda")
            engine = Engine({"generator": model}, EngineSettings(2**22, block_size=4))
            with cuda.running() as counted:
                decode(engine, PROMPTS)
            engine.close()
        except Exception as error:
            wrong[kind] = f"{type(error).__name__}: {error}"
        else:
            if not counted["replays"]:
                wrong[kind] = "its steps are not recorded"
    assert wrong == {}, wrong


class Counting(torch.nn.Module):
    """A layer whose results depend on how often it was called."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return self.layer(*args, **kwargs) * self.calls


class Asking(Counting):
    """A layer that asks the device for a number."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = self.layer(*args, **kwargs)
        return found * 2 if found[0, 0, 0].item() > 1e9 else found


@pytest.mark.parametrize(
    ("layer", "graphs", "reason"),
    [(Counting, 1, "replayed steps differ from launched ones"), (Asking, 0, "called a synchronizing CUDA operation")],
)
@pytest.mark.usefixtures("short_ladder")
def test_steps_that_cannot_be_replayed_are_launched_and_the_log_says_why(
    layer: type[Counting],
    graphs: int,
    reason: str,
    cuda: FakeCuda,
    make_engine: Callable[..., Engine],
    on_fake: Callable[[str], Model],
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO)
    model = on_fake("llama")
    assert isinstance(model.decoder.layers, TransformersLayers)
    module: Any = model.decoder.layers.model
    module.norm = layer(module.norm)  # what comes before, no kernel of the fake GPU hands on
    engine = make_engine(model)
    assert cuda.counts["graphs"] == graphs
    assert f"decode steps are launched kernel by kernel: {reason}" in caplog.text
    decode(engine, PROMPTS)
    assert cuda.counts["replays"] <= 1, "that of a trial"


@pytest.mark.usefixtures("short_ladder")
def test_layers_cannot_be_tapped_once_steps_are_recorded(
    make_engine: Callable[..., Engine], on_fake: Callable[[str], Model]
):
    model = on_fake("llama")
    model.decoder.layers.tap([1])
    engine = make_engine(model)
    model.decoder.layers.tap([1])  # is there
    for tap in (partial(model.decoder.layers.tap, [2]), partial(model.decoder.layers.tap_raw, 1)):
        with pytest.raises(RuntimeError, match="before an engine is made"):
            tap()
    engine.close()
    model.decoder.layers.tap([2])


@pytest.mark.parametrize(
    ("head_dim", "dtype", "shared", "fits"),
    [
        (256, torch.bfloat16, 99, True),
        (256, torch.float32, 99, False),
        (256, torch.float32, 163, True),
        (1024, torch.bfloat16, 227, False),
    ],
)
def test_heads_that_a_multiprocessor_has_no_room_for_are_refused(
    head_dim: int, dtype: torch.dtype, shared: int, fits: bool, cuda: FakeCuda, tmp_path: Path
):
    """99 KiB are those of Ada and of consumer Blackwell, 163 of an A100, 227 of Hopper."""
    cuda.shared_memory = shared * 1024
    sizes = replace(ODD, head_dim=head_dim)
    folder = write_checkpoint(tmp_path / "wide", "gemma3_text", sizes=sizes, head_dim=head_dim)
    checkpoint = Checkpoint(folder, model_impl=ModelImpl.TRANSFORMERS)
    if fits:
        load_generator(checkpoint, dtype, "cuda")
    else:
        with pytest.raises(CheckpointError, match=rf"keys of {head_dim} and values of {head_dim} .* --device cpu"):
            load_generator(checkpoint, dtype, "cuda")
