"""Decoders of transformers over kernels for GPUs: numbers in Triton's interpreter, waits on a GPU that is none."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_driver import drain, generate, read, release
from fake_cuda import FakeCuda
from plain import plain_greedy, plain_logits
from zoo_models import ODD, write_checkpoint

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import ModelImpl
from espalier.engine.models.zoo import loading
from espalier.engine.work import Generate, Generated, Sampling, Score, Scored
from espalier.kernels.triton.backend import TritonBackend
from espalier.kernels.triton.plan import Costs

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

    def load(kind: str, *, batch_invariant: bool = False) -> Model:
        backend = TritonBackend(Costs(processors=1), batch_invariant=batch_invariant)
        monkeypatch.setattr(loading, "choose_backend_for", lambda *_: backend)
        return load_generator(Checkpoint(folders[kind], model_impl=ModelImpl.TRANSFORMERS), torch.float32, "cpu")

    return load


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


@pytest.mark.parametrize("kind", [*FEW, *RECURRENT])
def test_steps_wait_for_nothing_but_their_results(
    kind: str, cuda: FakeCuda, make_engine: Callable[..., Engine], folders: dict[str, Path]
):
    checkpoint = Checkpoint(folders[kind], model_impl=ModelImpl.TRANSFORMERS)
    engine = make_engine(load_generator(checkpoint, torch.bfloat16, "cuda"))
    sequences = [engine.open("generator", some_ids(count)) for count in (3, 9)]
    for sequence in sequences:
        engine.submit(Generate("writer", sequence, (GREEDY,), 6, ""))
    with cuda.running() as counted:
        done = drain(engine)
    assert len(done) == 2
    assert counted["blocking"] == 0
    expected = {"attend_items", "write_tokens"} if kind not in ("mamba", "mamba2") else set()
    expected |= {"grouped_product"} if kind in EXPERTS else set()
    expected |= {"convolve_tokens", RECURRENT[kind]} if kind in RECURRENT else set()
    assert {launch.kernel for launch in cuda.launched} >= expected
    release(engine, *sequences, *(each.sequence for each in done if isinstance(each, Generated)))


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
