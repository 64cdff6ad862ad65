"""Whole searches on a GPU that is none: what they launch, copy and wait for; see tests/fake_cuda."""

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from search_runs import ALL, BEAM, BEST_OF_N, GREEDY, run
from tiny_models import edit_json
from trunk_heads import write_head

from espalier.engine.batches import GeneratorFirst
from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.errors import CheckpointError, MisuseError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import LoadFormat, Quantization
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.stats import StepRecord
from espalier.engine.work import Generate, Sampling, stream_key
from espalier.kernels.triton import recording
from espalier.prm.families import load_verifier
from espalier.prm.scorers.trunk_head import add_trunk_head
from espalier.prm.verifier import Verifier
from espalier.search.request import SearchRequest
from espalier.search.run.generator import Generator
from espalier.search.run.orchestrator import Orchestrator

LADDER = (1, 2, 4, *range(8, 73, 8))
ENGINE = EngineSettings(2**22, block_size=4)
Load = Callable[..., Model]
Make = Callable[..., Orchestrator]
TALK = {"temperature": 1.0, "top_p": 1.0}


@pytest.fixture
def cuda(tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A machine with two GPUs that draw blank lines, ends and answers as often as the talker does."""
    if torch.cuda.is_available():
        pytest.skip("there is a real GPU, which a fake one must not replace")
    monkeypatch.setattr(recording, "LADDER", LADDER)
    tokenizer = TextTokenizer(Checkpoint(tiny_checkpoints["talker"]))
    frequent = [tokenizer.token_id(token) for token in ("ĊĊ", "<|im_end|>", "\\boxed{1}", "\\boxed{2}", "1", "2", "a")]
    chances = torch.tensor([0.15, 0.05, 0.05, 0.05, 0.2, 0.2, 0.3])
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> torch.Tensor:
        return torch.tensor(frequent)[torch.multinomial(chances, count, replacement=True, generator=generator)]

    fake = FakeCuda(draw)
    with fake.installed():
        yield fake


@pytest.fixture
def load(cuda: FakeCuda, tiny_checkpoints: dict[str, Path]) -> Load:
    """Loads a tiny generator onto the fake GPU."""

    def make(name: str = "talker", device: str = "cuda", **options: Any) -> Model:
        return load_generator(Checkpoint(tiny_checkpoints[name], **options), torch.bfloat16, device)

    return make


@pytest.fixture
def searches(cuda: FakeCuda, load: Load, tiny_checkpoints: dict[str, Path]) -> Make:
    """Makes orchestrators on the fake GPU, of a talker and a classifier."""

    def make(
        model: Model | None = None,
        settings: EngineSettings = ENGINE,
        verifier: str = "classifier",
        talk: dict[str, float] = TALK,
        **options: Any,
    ) -> Orchestrator:
        model = model or load(**options)
        device = options.pop("device", "cuda")
        checkpoint = Checkpoint(tiny_checkpoints[verifier], **options)
        family = load_verifier(checkpoint, torch.bfloat16, device)
        engine = Engine({"generator": model, "verifier": family.model}, settings)
        return Orchestrator(engine, Generator(engine, "", talk), Verifier(family))

    return make


def solve(cuda: FakeCuda, orchestrator: Orchestrator, *requests: SearchRequest) -> dict[str, int]:
    """Run searches without a wait that the engine does not ask for; returns what the device was asked to do."""
    with cuda.running() as counted:
        results = run(orchestrator, *requests).results
    assert all(result.stop_reason == "finished" for result in results), [r.error for r in results]
    assert all(len(result.nodes) > 1 for result in results)
    orchestrator.engine.check_drained()
    orchestrator.close()
    return counted


SEVERAL = [replace(BEAM, seed=seed, beam_width=4, expansion=4) for seed in range(4)]
AHEAD = replace(ENGINE, launch_ahead=True)
FILTERED = [
    replace(BEAM, top_k=5),
    replace(BEAM, top_p=0.9, seed=2),
    replace(BEAM, min_p=0.1, seed=3),
    replace(BEAM, seed=4),
    replace(BEAM, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias="5:1.5", seed=6),
    replace(BEAM, top_k=7, top_p=0.5, temperature=0.6, seed=5),
    GREEDY,
]


def test_searches_replay_their_decode_steps_and_fetch_once_a_step(cuda: FakeCuda, searches: Make):
    orchestrator = searches()
    steps: list[StepRecord] = []
    orchestrator.engine.on_step = steps.append
    counted = solve(cuda, orchestrator, *SEVERAL)
    assert counted["to_host"] == sum(step.draws + step.reads > 0 for step in steps)
    decodes = [step for step in steps if step.rows == step.tokens == step.draws]
    assert counted["replays"] >= len(decodes) > 10


@pytest.mark.parametrize("third", range(3))
def test_every_algorithm_runs_ahead_of_its_results(third: int, cuda: FakeCuda, searches: Make):
    """A few side by side: with each engine its decode steps are recorded anew."""
    for_each = [(request, replace(request, seed=9)) for request in list(ALL.values())[third::3]]
    solve(cuda, searches(settings=AHEAD), *(request for both in for_each for request in both))


@pytest.mark.parametrize("settings", [ENGINE, AHEAD], ids=["waiting", "ahead"])
def test_filtered_and_greedy_searches_wait_for_nothing_more(settings: EngineSettings, cuda: FakeCuda, searches: Make):
    orchestrator = searches(settings=settings)
    cuda.launched.clear()
    solve(cuda, orchestrator, *FILTERED)
    assert "find_limits" in {launch.kernel for launch in cuda.launched}


@pytest.mark.parametrize("settings", [ENGINE, AHEAD], ids=["waiting", "ahead"])
def test_batch_invariant_searches_multiply_by_their_own_kernel(
    settings: EngineSettings, cuda: FakeCuda, searches: Make
):
    orchestrator = searches(settings=settings, batch_invariant=True)
    assert all(model.decoder.backend.rows_are_independent for model in orchestrator.engine.models.values())
    solve(cuda, orchestrator, *SEVERAL)
    kernels = {launch.kernel for launch in cuda.launched}
    assert {"multiply_rows", "attend_items"} <= kernels
    tiles = {dict(launch.variant)["TILE_ROWS"] for launch in cuda.launched if launch.kernel == "attend_items"}
    assert len(tiles) == 1, "tiles of attention are of one size"


@pytest.mark.parametrize("settings", [ENGINE, AHEAD], ids=["waiting", "ahead"])
def test_a_trunk_heads_scores_come_with_the_draws(settings: EngineSettings, cuda: FakeCuda, load: Load, tmp_path: Path):
    model = load()
    head = write_head(tmp_path / "head", model.digest, model.config.hidden_size, 2)
    model, scorer = add_trunk_head(Checkpoint(head), model)
    engine = Engine({"generator": model}, settings)
    solve(cuda, Orchestrator(engine, Generator(engine, "", TALK), scorer), *SEVERAL, BEST_OF_N)


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-late-window", "qwen3-mixed-window"])
@pytest.mark.parametrize("settings", [ENGINE, AHEAD], ids=["waiting", "ahead"])
def test_models_with_windows(name: str, settings: EngineSettings, cuda: FakeCuda, load: Load, searches: Make):
    solve(cuda, searches(load(name), settings), *SEVERAL)


def test_a_verifier_that_writes_decodes_like_a_generator(cuda: FakeCuda, load: Load):
    """It is recorded when it first draws; the others never draw, and are never recorded."""
    engine = Engine({"verifier": load()}, AHEAD)
    assert cuda.counts["graphs"] == 0
    decode(engine, rows=5, role="verifier")
    assert cuda.counts["graphs"] == len(LADDER)


def test_engines_in_a_row_record_their_own_steps(cuda: FakeCuda, load: Load, searches: Make):
    """The graphs of the first are gone when those of the second are recorded, and its memory is given back."""
    model = load()
    first = searches(model)
    solve(cuda, first, BEAM)
    pool = weakref.ref(first.engine.kv_pool.bytes)
    first.engine.close()
    assert pool() is None
    with pytest.raises(MisuseError, match="closed"):
        decode(first.engine, rows=1)
    del first
    gc.collect()
    graphs = cuda.counts["graphs"]
    solve(cuda, searches(model, replace(ENGINE, block_size=8)), BEAM)
    assert cuda.counts["graphs"] == graphs + len(LADDER)


def test_an_engine_on_a_gpu_takes_its_thresholds(cuda: FakeCuda, load: Load):
    engine = Engine({"generator": load()}, ENGINE)
    assert engine._batches.role_policy == GeneratorFirst.on("cuda") != GeneratorFirst.on("cpu")


def test_a_model_serves_two_engines_at_once(cuda: FakeCuda, load: Load, searches: Make):
    model = load()
    orchestrators = [searches(model), searches(model, replace(ENGINE, block_size=8))]
    for orchestrator in orchestrators:
        solve(cuda, orchestrator, BEAM)


def test_a_models_steps_are_recorded_on_one_stream(cuda: FakeCuda, searches: Make):
    searches()
    assert cuda.counts["graphs"] == len(LADDER)
    assert cuda.counts["streams"] == 2, "one with cuBLAS's workspaces, which are in the memory's plan, one without"


def test_attention_of_a_recorded_layer_is_one_launch_of_narrow_items_and_one_beside_it_of_wide_ones(
    cuda: FakeCuda, load: Load, monkeypatch: pytest.MonkeyPatch
):
    """Launches are counted while steps are recorded: each once to compile it, and once in the graph."""
    monkeypatch.setattr(recording, "LADDER", ladder := (1, 2, 64, 72, 80))
    model = load()
    layers = model.config.num_layers
    cuda.launched.clear()
    Engine({"generator": model}, ENGINE)
    kernels = [launch.kernel for launch in cuda.launched]
    narrow_rows = 16 // (model.config.num_heads // model.config.num_kv_heads)
    alone = sum(tokens <= narrow_rows for tokens in ladder)
    assert kernels.count("attend_items") == 2 * layers * (2 * len(ladder) - alone)
    assert cuda.counts["launches beside"] == layers * 2, "of more than 64 tokens"


def test_the_second_gpu_computes_for_whatever_thread_asks(cuda: FakeCuda, searches: Make):
    """A thread begins with the first GPU, whose kernels could not read the second one's memory."""
    orchestrator = searches(device="cuda:1")

    def run_there() -> None:
        assert cuda.current == 0
        with cuda:
            solve(cuda, orchestrator, *SEVERAL, BEST_OF_N)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(run_there).result()


def decode(engine: Engine, rows: int, role: str = "generator", tokens: int = 60, steps: int = 8) -> None:
    """Let as many branches decode, some steps long."""
    for row in range(rows):
        sequence = engine.open(role, [3 + row % 300] * 20 + [4 + row // 300])
        sampling = Sampling(temperature=1.0, key=stream_key(0, str(row), (0,)))
        engine.submit(Generate(None, sequence, (sampling,), tokens, "", in_place=True))
    for _ in range(steps):
        engine.step()


@pytest.mark.parametrize("settings", [ENGINE, AHEAD], ids=["waiting", "ahead"])
def test_a_steady_decode_step_is_one_replay_two_copies_and_one_wait(
    settings: EngineSettings, cuda: FakeCuda, load: Load
):
    engine = Engine({"generator": replace(load(), eos_token_ids=())}, replace(settings, block_size=16))
    decode(engine, rows=7)  # from the 28th of 32 tokens on: their blocks, and so the plan of attention, stay the same
    for _ in range(3):
        waits = cuda.queue.waits
        with cuda.running() as counted:
            engine.step()
        drawn_on_the_way = {"launches": 1} if settings.launch_ahead else {}
        # The tokens, then the random numbers; two kernels draw. The pinned memory is that of the numbers and the draws.
        expected = {"replays": 1, "to_device": 2, "to_host": 1, "launches": 2, "pinned": 2}
        expected["launches"] += sum(drawn_on_the_way.values())
        assert {name: n for name, n in counted.items() if n} == expected
        assert cuda.queue.waits - waits == 2, (
            "for the results, and for memory of two steps ago, which is free long since"
        )


def test_a_step_of_many_branches_draws_from_256_rows_at_a_time(cuda: FakeCuda, load: Load):
    """Float32 logits of 2,048 rows and 152,000 tokens would be 1.2 GB, several times over."""
    engine = Engine({"generator": replace(load(), eos_token_ids=())}, EngineSettings(2**25, block_size=4))
    decode(engine, rows=600, steps=12)
    drawn = [launch for launch in cuda.launched if launch.kernel == "measure_segments"]
    assert max(launch.shapes["logits"][0] for launch in drawn) == 256
    assert {launch.shapes["logits"][0] for launch in drawn} >= {256, 600 - 2 * 256}


def test_no_search_waits_for_a_kernel_to_be_compiled(cuda: FakeCuda, searches: Make):
    """Triton compiles for each number that is one or a multiple of 16, and for each address that is aligned."""
    orchestrator = searches(settings=AHEAD)
    compiled = {(launch.kernel, launch.variant) for launch in cuda.launched}
    for seed in range(2):
        cuda.launched.clear()
        solve(cuda, orchestrator, *(replace(one, seed=10 * seed + one.seed) for one in (*SEVERAL, *FILTERED)))
        assert {(launch.kernel, launch.variant) for launch in cuda.launched} - compiled == set()


@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.INT4])
def test_quantised_weights_are_refused_where_rows_must_not_depend_on_their_batch(
    quantization: Quantization, load: Load
):
    with pytest.raises(CheckpointError, match=r"--batch-invariant.*--generator-quantization"):
        load(quantization=quantization, batch_invariant=True)


def test_int8_weights_are_refused_on_a_gpu_with_what_can_be_had_there(load: Load):
    with pytest.raises(CheckpointError, match=r"copied to bfloat16 .* int4 .*--verifier-quantization.*--device cpu"):
        load(quantization=Quantization.INT8)


def test_more_query_heads_to_a_kv_head_than_attention_has_room_for_are_refused(
    cuda: FakeCuda, load: Load, copy_of: Callable[[str], Path]
):
    folder = copy_of("talker")
    edit_json(folder / "config.json", {"num_attention_heads": 65, "num_key_value_heads": 1, "head_dim": 2})
    checkpoint = Checkpoint(folder, LoadFormat.DUMMY)
    with pytest.raises(CheckpointError, match=r"65 query heads share each .*64 at most.*--device cpu"):
        load_generator(checkpoint, torch.bfloat16, "cuda")
