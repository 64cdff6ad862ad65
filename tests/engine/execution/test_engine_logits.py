from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_driver import drain, generate, read, release
from plain import plain_greedy, plain_logits
from tiny_models import edit_tensors

from espalier.engine.engine import Engine
from espalier.engine.errors import NumericalError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import load_generator
from espalier.engine.work import Generate, Generated, Sampling, Score, Scored

GENERATORS = [
    "qwen2-tied",
    "qwen2-untied",
    "llama3-rope",
    "talker",
    "qwen3",
    "qwen3-biased",
    "mistral",
    "mistral-window",
    "qwen2-late-window",
    "qwen3-mixed-window",
    "llama-biased",
    "llama-linear",
    "llama-dynamic",
    "qwen2-yarn",
    "gemma3",
    "gemma3-biased",
    "phi3",
    "phi3-longrope",
]
GREEDY = Sampling(temperature=0.0)
NEVER_ENDS: dict[str, object] = {"delimiter": ""}


def some_ids(count: int, seed: int = 0) -> list[int]:
    """Ordinary ids: no special token, so no end of sequence."""
    return np.random.default_rng(seed).integers(4, 330, count).tolist()


def assert_logits_equal(logits: np.ndarray, folder: Path, token_ids: list[int], last: int) -> None:
    """The engine's logits at the last positions of `token_ids` are transformers'."""
    expected = plain_logits(folder, token_ids)[-last:]
    torch.testing.assert_close(torch.from_numpy(logits[-last:]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 70])
def test_prefill_logits_equal_transformers(
    name: str, length: int, make_engine: Callable[..., Engine], tiny_checkpoints: dict[str, Path]
):
    engine, ids = make_engine(name), some_ids(length)
    sequence = engine.open("generator", [])
    assert_logits_equal(read(engine, sequence, ids), tiny_checkpoints[name], ids, length)
    release(engine, sequence)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_near_to_float32_as_transformers_is(
    name: str, dtype: torch.dtype, make_engine: Callable[..., Engine], tiny_checkpoints: dict[str, Path]
):
    folder, ids = tiny_checkpoints[name], some_ids(40)
    engine = make_engine(load_generator(Checkpoint(folder), dtype, "cpu"), max_batch_tokens=16)
    sequence = engine.open("generator", [])
    logits = torch.from_numpy(read(engine, sequence, ids))
    exact = plain_logits(folder, ids)
    theirs = (plain_logits(folder, ids, dtype).float() - exact).norm() / exact.norm()
    assert (logits - exact).norm() / exact.norm() < 1.5 * theirs
    assert engine.kv_pool.bytes.view(dtype).any(), "keys and values are kept in the model's own precision"
    release(engine, sequence)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_overflow_are_an_error(
    temperature: float, make_engine: Callable[..., Engine], copy_of: Callable[[str], Path]
):
    folder = copy_of("qwen2-untied")
    edit_tensors(folder / "model.safetensors", {"model.norm.weight": torch.full((48,), 3e38)})
    engine = make_engine(load_generator(Checkpoint(folder), torch.float32, "cpu"))
    sequence = engine.open("generator", [5, 6, 7], owner="search")
    engine.submit(Generate("search", sequence, (Sampling(temperature),), 4, ""))
    with pytest.raises(NumericalError, match="the generator's logits are not numbers"):
        drain(engine)
    engine.cancel("search")
    release(engine, sequence)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("max_batch_tokens", [1, 7])
def test_chunked_prefill_logits_equal_transformers(
    name: str, max_batch_tokens: int, make_engine: Callable[..., Engine], tiny_checkpoints: dict[str, Path]
):
    engine, ids = make_engine(name, max_batch_tokens=max_batch_tokens), some_ids(31)
    sequence = engine.open("generator", ids[:5])
    logits = read(engine, sequence, ids[5:])
    assert engine.stats()["generator"].steps == -(-31 // max_batch_tokens)
    assert_logits_equal(logits, tiny_checkpoints[name], ids, 26)
    release(engine, sequence)


@pytest.mark.parametrize("name", GENERATORS)
def test_tokens_fed_one_by_one_give_transformers_logits(
    name: str, make_engine: Callable[..., Engine], tiny_checkpoints: dict[str, Path]
):
    engine, ids = make_engine(name), some_ids(20)
    sequence = engine.open("generator", [])
    logits = np.concatenate([read(engine, sequence, [token]) for token in ids])
    assert_logits_equal(logits, tiny_checkpoints[name], ids, 20)
    release(engine, sequence)


@pytest.mark.parametrize("name", GENERATORS)
def test_greedy_decoding_equals_transformers_token_by_token(
    name: str, make_engine: Callable[..., Engine], tiny_checkpoints: dict[str, Path]
):
    engine, ids = make_engine(name), some_ids(9, seed=3)
    sequence = engine.open("generator", ids)
    (done,) = generate(engine, sequence, GREEDY, tokens=12, **NEVER_ENDS)
    expected, log_probability = plain_greedy(tiny_checkpoints[name], ids, len(done.token_ids))
    assert done.token_ids == expected
    assert done.log_probability == pytest.approx(log_probability, abs=1e-4)
    release(engine, sequence, done.sequence)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("length", [6, 8, 9])
def test_children_and_parent_of_a_fork_continue_each_on_its_own(
    name: str, length: int, make_engine: Callable[..., Engine], tiny_checkpoints: dict[str, Path]
):
    engine, ids = make_engine(name), some_ids(length)
    parent = engine.open("generator", [])
    read(engine, parent, ids, [])
    family = [*engine.fork(parent, 3), parent]
    tails = [some_ids(count, seed=count) for count in (1, 2, 5, 11)]
    for sequence, tail in zip(family, tails, strict=True):
        engine.submit(Score("reader", sequence, tuple(tail), tuple(range(len(tail)))))
    done = [d for d in drain(engine) if isinstance(d, Scored)]
    by_row = {d.work.sequence.row: d.values for d in done}
    for sequence, tail in zip(family, tails, strict=True):
        assert_logits_equal(by_row[sequence.row], tiny_checkpoints[name], ids + tail, len(tail))
    grandchild = engine.fork(family[1], 1)[0]
    assert_logits_equal(read(engine, grandchild, [77, 78]), tiny_checkpoints[name], [*ids, *tails[1], 77, 78], 2)
    release(engine, *family, grandchild)


@pytest.mark.parametrize("name", GENERATORS)
def test_sampled_children_hold_the_kv_of_their_own_tokens(
    name: str, make_engine: Callable[..., Engine], tiny_checkpoints: dict[str, Path]
):
    engine, ids = make_engine(name), some_ids(10)
    sequence = engine.open("generator", ids)
    samplings = [Sampling(key=key) for key in range(4)]
    children = generate(engine, sequence, *samplings, tokens=7, **NEVER_ENDS)
    assert len({tuple(child.token_ids) for child in children}) == 4, "a degenerate model would prove nothing"
    for child in children:
        logits = read(engine, child.sequence, [50, 60])
        assert_logits_equal(logits, tiny_checkpoints[name], [*ids, *child.token_ids, 50, 60], 2)
        release(engine, child.sequence)
    assert_logits_equal(read(engine, sequence, [70]), tiny_checkpoints[name], [*ids, 70], 1)
    release(engine, sequence)


def test_a_sequence_generated_in_place_equals_its_forked_twin(make_engine: Callable[..., Engine]):
    engine, ids = make_engine(), some_ids(6)
    sequence = engine.open("generator", ids)
    sampling = Sampling(key=5)
    (forked,) = generate(engine, sequence, sampling, **NEVER_ENDS)
    (placed,) = generate(engine, sequence, sampling, in_place=True, **NEVER_ENDS)
    assert placed.sequence is sequence
    assert (placed.token_ids, placed.log_probability) == (forked.token_ids, forked.log_probability)
    (further,) = generate(engine, sequence, GREEDY, tokens=3, in_place=True, **NEVER_ENDS)
    (twin,) = generate(engine, forked.sequence, GREEDY, tokens=3, in_place=True, **NEVER_ENDS)
    assert further.token_ids == twin.token_ids
    release(engine, sequence, forked.sequence)


@pytest.mark.parametrize("length", [7, 8])
def test_expanding_a_fully_computed_node_again_gives_right_logits_and_writes_no_block(
    length: int, make_engine: Callable[..., Engine], tiny_checkpoints: dict[str, Path]
):
    engine, ids = make_engine("qwen2-untied"), some_ids(length)
    sequence = engine.open("generator", ids)
    first = generate(engine, sequence, GREEDY, tokens=1, **NEVER_ENDS)[0]
    scheduler = engine.schedulers["generator"]
    kv_pool, table = engine.kv_pool.bytes.clone(), scheduler.table.block_table(sequence).tolist()
    again = generate(engine, sequence, GREEDY, Sampling(key=9), tokens=1, **NEVER_ENDS)
    assert torch.equal(engine.kv_pool.bytes, kv_pool)
    assert scheduler.table.block_table(sequence).tolist() == table
    assert engine.stats()["generator"].copied_blocks == 0
    expected = torch.log_softmax(plain_logits(tiny_checkpoints["qwen2-untied"], ids)[-1], dim=-1)
    for child in again:
        assert child.log_probability == pytest.approx(float(expected[child.token_ids[0]]), abs=1e-4)
    assert again[0].token_ids == first.token_ids
    release(engine, sequence, first.sequence, *(child.sequence for child in again))


def test_a_token_computed_again_for_its_logits_is_not_written_again(make_engine: Callable[..., Engine]):
    engine = make_engine("qwen2-untied")
    sequence = engine.open("generator", some_ids(7))
    first = generate(engine, sequence, GREEDY, tokens=1, **NEVER_ENDS)[0]
    scheduler = engine.schedulers["generator"]
    last_block = int(scheduler.table.block_table(sequence)[-1])
    slots = scheduler.pools[0].layout.blocks_per_slab
    scheduler.pools[0].layout.block_views(engine.kv_pool.bytes)[0][last_block // slots, :, last_block % slots] = (
        0.5  # a write would show
    )
    marked = engine.kv_pool.bytes.clone()
    again = generate(engine, sequence, GREEDY, tokens=1, **NEVER_ENDS)[0]
    assert torch.equal(engine.kv_pool.bytes, marked)
    release(engine, sequence, first.sequence, again.sequence)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_logits_equal_transformers_after_a_preemption(
    name: str, steps: int, make_engine: Callable[..., Engine], tiny_checkpoints: dict[str, Path]
):
    engine, ids = make_engine(name, max_batch_tokens=8), some_ids(21)
    parent = engine.open("generator", ids, owner="search")
    engine.submit(Generate("search", parent, tuple(Sampling(key=key) for key in range(3)), 6, ""))
    children = [done for done in drain(engine) if isinstance(done, Generated)]
    for child in children:
        engine.submit(Score("search", child.sequence, (50, 60, 70), (0, 1, 2)))
    done = [d for _ in range(steps) for d in engine.step()]
    engine.suspend("search")
    engine.resume_owner("search")
    assert engine.stats()["generator"].live_blocks == 0
    done += drain(engine)
    assert len(done) == len(children) == 3
    values = {d.work.sequence: d.values for d in done if isinstance(d, Scored)}
    for child in children:
        text = [*ids, *child.token_ids, 50, 60, 70]
        assert_logits_equal(values[child.sequence], tiny_checkpoints[name], text, 3)
        release(engine, child.sequence)
    release(engine, parent)


def test_a_mixed_batch_of_prefill_decode_and_scoring_gives_everyone_their_own_logits(
    make_engine: Callable[..., Engine], tiny_checkpoints: dict[str, Path]
):
    engine = make_engine("llama3-rope", max_batch_tokens=16)
    prompts = [some_ids(3 + 5 * i, seed=i) for i in range(6)]
    sequences = [engine.open("generator", prompt) for prompt in prompts]
    for i, sequence in enumerate(sequences):
        if i % 2:
            engine.submit(Score("reader", sequence, (9, 8, 7), (0, 2)))
        else:
            engine.submit(Generate("sampler", sequence, (GREEDY,), 10, ""))
    folder = tiny_checkpoints["llama3-rope"]
    for done in drain(engine):
        prompt = prompts[sequences.index(done.work.sequence)]
        if isinstance(done, Generated):
            assert done.token_ids == plain_greedy(folder, prompt, len(done.token_ids))[0]
            release(engine, done.sequence)
        else:
            expected = plain_logits(folder, [*prompt, 9, 8, 7])[[-3, -1]]
            torch.testing.assert_close(torch.from_numpy(done.values), expected, rtol=1e-4, atol=1e-4)
    release(engine, *sequences)


@pytest.mark.parametrize("name", ["qwen2-untied", "qwen3-mixed-window", "llama-biased", "gemma3", "phi3-longrope"])
def test_logits_have_the_same_bits_alone_and_in_company(name: str, make_engine: Callable[..., Engine]):
    ids = some_ids(23)
    alone, crowded = make_engine(name), make_engine(name, max_batch_tokens=19)
    only = alone.open("generator", [])
    expected = read(alone, only, ids)
    for i in range(7):
        sequence = crowded.open("generator", some_ids(1 + 4 * i, seed=i))
        crowded.submit(Score("others", sequence, (5, 6), (1,)))
    mine = crowded.open("generator", [])
    crowded.submit(Score("me", mine, tuple(ids), tuple(range(23))))
    done = drain(crowded)
    values = next(d.values for d in done if isinstance(d, Scored) and d.work.owner == "me")
    assert np.array_equal(values, expected)
    release(alone, only)
    release(crowded, *(d.work.sequence for d in done))


def test_two_engines_in_one_process_do_not_meet(make_engine: Callable[..., Engine], tiny_checkpoints: dict[str, Path]):
    engines = {name: make_engine(name) for name in ("qwen2-tied", "llama3-rope")} | {"again": make_engine("qwen2-tied")}
    ids = {name: some_ids(15, seed=i) for i, name in enumerate(engines)}
    sequences = {name: engine.open("generator", []) for name, engine in engines.items()}
    for name, engine in engines.items():
        engine.submit(Score("reader", sequences[name], tuple(ids[name]), tuple(range(15))))
    for name, engine in engines.items():
        (done,) = engine.step()
        assert isinstance(done, Scored)
        folder = tiny_checkpoints["qwen2-tied" if name == "again" else name]
        assert_logits_equal(done.values, folder, ids[name], 15)
        release(engine, sequences[name])


def test_both_models_of_an_engine_compute_right_in_one_kv_pool(
    make_engine: Callable[..., Engine], tiny_checkpoints: dict[str, Path]
):
    engine = make_engine("qwen2-untied", "llama3-rope")  # any model can sit in the verifier's place
    ids = some_ids(21)
    sequences = {role: engine.open(role, []) for role in ("generator", "verifier")}
    for at in range(0, 21, 3):
        for role, name in (("generator", "qwen2-untied"), ("verifier", "llama3-rope")):
            values = read(engine, sequences[role], ids[at : at + 3])
            assert_logits_equal(values, tiny_checkpoints[name], ids[: at + 3], 3)
    release(engine, *sequences.values())
