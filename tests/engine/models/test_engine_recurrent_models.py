"""Decoders with recurrent layers over the engine's pool: states shared by forks, copied, cached, computed again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import drain, generate, read, release
from plain import plain_greedy, plain_logits
from zoo_models import write_checkpoint

from espalier.engine.engine import Engine
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import ModelImpl
from espalier.engine.work import Generate, Generated, Sampling, Score, Scored

KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "qwen3_next": {},
    "olmo_hybrid": {},
    "nemotron_h": {},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    "bamba": {"attn_layer_indices": [1, 3], "num_hidden_layers": 4},
    "falcon_h1": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4, "num_dense_layers": 1},
    "lfm3": {},
    "zamba": {},
    "zamba2": {},
    "mamba2": {},
    "mamba": {},
    "falcon_mamba": {},
    "jamba": {},
}
"""Model types, and fields without which their defaults have layers of one kind alone."""
FEW = ["qwen3_5_text", "qwen3_next", "nemotron_h", "mamba2", "mamba", "lfm3"]
"""One of each kind of recurrent layer; the last one's states are smaller than a block of its KV."""
GREEDY = Sampling(temperature=0.0)


class Made(dict[str, Any]):
    """Values by model type, each made once it is asked for."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        self._make = make

    def __missing__(self, kind: str) -> Any:
        self[kind] = self._make(kind)
        return self[kind]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("recurrent")
    return Made(lambda kind: write_checkpoint(root / kind, kind, **KINDS[kind]))


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, Model]:
    return Made(lambda kind: load(folders[kind]))


def load(folder: Path, **options: Any) -> Model:
    given: dict[str, Any] = {"model_impl": ModelImpl.TRANSFORMERS} | options
    checkpoint = Checkpoint(folder, **given)
    return load_generator(checkpoint, torch.float32, "cpu")


def some_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, 330, count).tolist()


def assert_logits_equal(logits: np.ndarray, folder: Path, token_ids: list[int], last: int) -> None:
    expected = plain_logits(folder, token_ids)[-last:]
    difference = (torch.from_numpy(logits[-last:]) - expected).abs().max() / expected.abs().max()
    assert difference < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_forks_and_single_tokens_equal_transformers(
    kind: str, make_engine: Callable[..., Engine], models: dict[str, Model], folders: dict[str, Path]
):
    engine, ids = make_engine(models[kind], max_batch_tokens=7), some_ids(26)
    assert models[kind].config.state_shapes
    parent = engine.open("generator", ids[:5])
    assert_logits_equal(read(engine, parent, ids[5:]), folders[kind], ids, 21)
    family = [*engine.fork(parent, 2), parent]
    tails = [some_ids(count, seed=count) for count in (1, 5, 9)]
    for sequence, tail in zip(family, tails, strict=True):
        engine.submit(Score("reader", sequence, tuple(tail), tuple(range(len(tail)))))
    by_row = {d.work.sequence.row: d.values for d in drain(engine) if isinstance(d, Scored)}
    for sequence, tail in zip(family, tails, strict=True):
        assert_logits_equal(by_row[sequence.row], folders[kind], ids + tail, len(tail))
    for token in (7, 8):
        tails[0].append(token)
        assert_logits_equal(read(engine, family[0], [token]), folders[kind], ids + tails[0], 1)
    release(engine, *family)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_equals_transformers_token_by_token(
    kind: str, make_engine: Callable[..., Engine], models: dict[str, Model], folders: dict[str, Path]
):
    engine, ids = make_engine(models[kind]), some_ids(9, seed=3)
    sequence = engine.open("generator", ids)
    (done,) = generate(engine, sequence, GREEDY, tokens=12, delimiter="")
    expected, log_probability = plain_greedy(folders[kind], ids, len(done.token_ids))
    assert done.token_ids == expected
    assert done.log_probability == pytest.approx(log_probability, abs=1e-3)
    (again,) = generate(engine, sequence, GREEDY, tokens=12, delimiter="")
    assert (again.token_ids, again.log_probability) == (done.token_ids, done.log_probability), "from the kept state"
    release(engine, sequence, done.sequence, again.sequence)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_has_the_same_bits_alone_and_in_company_and_in_other_chunks(
    kind: str, make_engine: Callable[..., Engine], models: dict[str, Model]
):
    ids = some_ids(23, seed=5)

    def run(company: int, max_batch_tokens: int) -> tuple[np.ndarray, list[int], float]:
        engine = make_engine(models[kind], max_batch_tokens=max_batch_tokens, prefix_cache=False)
        others = [engine.open("generator", some_ids(3 + 5 * i, seed=10 + i), owner="others") for i in range(company)]
        for other in others:
            engine.submit(Generate("others", other, (Sampling(key=4), Sampling(key=8)), 20, ""))
        sequence = engine.open("generator", ids[:12])
        engine.submit(Score("reader", sequence, tuple(ids[12:]), tuple(range(11))))
        done = drain(engine)
        (scored,) = (d for d in done if isinstance(d, Scored))
        (child,) = generate(engine, sequence, Sampling(key=3), tokens=8, delimiter="")
        release(engine, sequence, child.sequence, *others, *(d.sequence for d in done if isinstance(d, Generated)))
        return scored.values, list(child.token_ids), child.log_probability

    alone, *in_company = run(0, 64), run(1, 64), run(5, 64), run(5, 9)
    for values, token_ids, log_probability in in_company:
        assert np.array_equal(values, alone[0])
        assert (token_ids, log_probability) == alone[1:]


@pytest.mark.parametrize("kind", FEW[:-1])
def test_a_pool_that_holds_few_sequences_at_a_time_gives_the_same_bits(
    kind: str, make_engine: Callable[..., Engine], models: dict[str, Model]
):
    def run(states: int) -> tuple[dict[tuple[str, tuple[int, ...]], tuple[list[int], float]], int]:
        size, texts = state_slab(models[kind]), dict[tuple[str, tuple[int, ...]], tuple[list[int], float]]()
        engine = make_engine(
            models[kind], max_batch_tokens=11, kv_memory_bytes=states * size, slab_bytes=size, reserved_share=0.01
        )
        each = {name: 5 if pool.holds_states else 12 for name, pool in engine.admission.pools.items()}
        reserved = {f"search {i}": engine.admission.try_reserve(each, f"search {i}") for i in range(5)}
        prompts = {f"search {i}": engine.open("generator", some_ids(7 + i, i), owner=f"search {i}") for i in range(5)}
        for i, (owner, prompt) in enumerate(prompts.items()):
            engine.submit(Generate(owner, prompt, (Sampling(key=2 * i), Sampling(key=2 * i + 1)), 12, ""))
        while engine.busy:
            for done in engine.step():
                assert isinstance(done, Generated)
                owner = str(done.work.owner)
                texts[owner, done.indices] = list(done.token_ids), done.log_probability
                release(engine, done.sequence)
                if len([asked for asked in texts if asked[0] == owner]) == 2:
                    release(engine, prompts[owner])
                    reservation = reserved[owner]
                    assert reservation is not None
                    engine.admission.release(reservation)
            engine.check_integrity()
        return texts, engine.stats()["generator"].preemptions

    roomy, _ = run(64)
    tight, preemptions = run(9)
    assert preemptions
    assert tight == roomy


def state_slab(model: Model) -> int:
    """Bytes of a slab that holds one state, and several blocks of the model's KV."""
    return max(model.config.state_bytes, 4 * model.config.kv_bytes_per_token(4))


@pytest.mark.parametrize("kind", FEW)
def test_generation_that_was_preempted_has_the_same_bits_and_computes_shared_tokens_once(
    kind: str, make_engine: Callable[..., Engine], models: dict[str, Model]
):
    def run(preempted_after: int, evict: bool = False) -> tuple[dict[tuple[int, ...], tuple[list[int], float]], int]:
        engine, texts, steps = make_engine(models[kind], max_batch_tokens=9), {}, 0
        sequence = engine.open("generator", some_ids(26), owner="search")
        engine.submit(Generate("search", sequence, tuple(Sampling(key=key) for key in range(4)), 14, ""))
        while engine.busy:
            for done in engine.step():
                assert isinstance(done, Generated)
                texts[done.indices] = list(done.token_ids), done.log_probability
                release(engine, done.sequence)
            steps += 1
            if steps == preempted_after:
                engine.suspend("search")
                assert engine.stats()["generator"].live_blocks == 0
                if evict:
                    evict_all(engine)
                engine.resume_owner("search")
            engine.check_integrity()
        release(engine, sequence)
        return texts, engine.stats()["generator"].computed_tokens

    whole, computed = run(0)
    assert run(9) == (whole, computed), "what nobody else needs the room of is not computed again"
    again, more = run(9, evict=True)
    assert again == whole
    assert 26 <= more - computed < 26 + 4 * 14, "the prompt again, not once for each sample"


def evict_all(engine: Engine) -> None:
    """Empty the prefix cache of an engine where nothing is live."""
    for pool in engine.admission.pools.values():
        while pool.reclaim_idle_slab():
            pass


def test_what_was_preempted_goes_on_from_the_nearest_state_that_is_left(
    make_engine: Callable[..., Engine], models: dict[str, Model]
):
    engine = make_engine(models["qwen3_next"])
    parent = engine.open("generator", some_ids(10), owner="search")
    read(engine, parent, some_ids(3, seed=1), [])
    child = engine.fork(parent, 1)[0]
    read(engine, child, some_ids(6, seed=2), [])

    def preempted() -> None:
        engine.suspend("search")
        engine.resume_owner("search")

    def computed_for(*work: tuple[KVSequence, list[int]]) -> int:
        before = engine.stats()["generator"].computed_tokens
        for sequence, token_ids in work:
            engine.submit(Score("reader", sequence, tuple(token_ids), (0,)))
        drain(engine)
        return engine.stats()["generator"].computed_tokens - before

    preempted()
    assert computed_for((child, [5]), (parent, [5])) == 2, "each from its own"
    release(engine, child)
    preempted()
    again = engine.fork(parent, 1)[0]
    assert computed_for((again, [6, 7])) == 2, "from the parent's, which is in the middle of a block"
    preempted()
    evict_all(engine)
    assert computed_for((again, [8]), (parent, [8])) == 17 + 15 - 12, "what they share once, up to a block"
    release(engine, parent, again)


def test_forks_share_a_state_until_they_go_on_and_every_sequence_holds_one(
    make_engine: Callable[..., Engine], models: dict[str, Model]
):
    engine = make_engine(models["qwen3_5_text"], prefix_cache=False)
    states = engine.admission.pools["generator/states"]
    parent = engine.open("generator", some_ids(11))
    read(engine, parent, [5], [])
    children = engine.fork(parent, 4)
    assert states.live_blocks == 1, "nobody has gone on yet"
    read(engine, children[0], [6, 7], [])
    assert (states.live_blocks, engine.stats()["generator"].copied_blocks) == (2, 1)
    for child in children:
        engine.submit(Score("reader", child, (8, 9), ()))
    drain(engine)
    assert (states.live_blocks, states.live_bytes) == (5, 5 * models["qwen3_5_text"].config.state_bytes)
    release(engine, parent)
    stats = engine.stats()["generator"]
    assert (states.live_blocks, stats.live_states, stats.cached_states) == (4, 4, 0)
    release(engine, *children)
    assert states.live_blocks == 0


def test_a_prompt_that_was_seen_goes_on_from_its_last_full_block(
    make_engine: Callable[..., Engine], models: dict[str, Model]
):
    engine, ids = make_engine(models["qwen3_next"]), some_ids(23)
    first, second = engine.open("generator", ids), engine.open("generator", [*ids, 9])
    for sequence in (first, second):
        engine.submit(Score("reader", sequence, (5,), (0,)))
    values = [done.values for done in drain(engine) if isinstance(done, Scored)]
    assert engine.stats()["generator"].computed_tokens == 24 + 5, "the second begins with the first one's 20 tokens"
    release(engine, first, second)
    assert engine.stats()["generator"].cached_blocks
    again = engine.open("generator", ids)
    assert np.array_equal(read(engine, again, [5]), values[0])
    assert engine.stats()["generator"].computed_tokens == 24 + 5 + 4
    release(engine, again)


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2"])
def test_a_path_that_was_released_is_not_computed_again(
    kind: str, make_engine: Callable[..., Engine], models: dict[str, Model]
):
    engine, ids = make_engine(models[kind]), some_ids(10)

    def computed_for(token_ids: list[int], *more: int) -> tuple[int, np.ndarray]:
        before, sequence = engine.stats()["generator"].computed_tokens, engine.open("generator", token_ids)
        values = read(engine, sequence, list(more))
        release(engine, sequence)
        return engine.stats()["generator"].computed_tokens - before, values

    prompt = engine.open("generator", ids)
    children = generate(engine, prompt, *(Sampling(key=key) for key in range(3)), tokens=7, delimiter="")
    paths = [ids + list(child.token_ids) for child in children]
    assert len(set(map(tuple, paths))) == 3
    release(engine, prompt, *(child.sequence for child in children))
    (_, expected), _ = computed_for(paths[0], 5, 6), engine.check_drained()
    fresh = make_engine(models[kind], prefix_cache=False)
    sequence = fresh.open("generator", paths[0])
    assert np.array_equal(read(fresh, sequence, [5, 6]), expected)
    release(fresh, sequence)
    for path in paths[1:]:
        assert computed_for(path, 5)[0] == 2, "the last token, which was never computed, and the next one"
    assert computed_for([*paths[0], 5, 6], 7)[0] == 1, "from where the reading ended"
    assert computed_for([*ids, 9], 7)[0] <= 2 + len(ids) % 4, "from the prompt's last full block"


def test_what_is_released_gives_way_before_a_prompt_that_is_kept(
    make_engine: Callable[..., Engine], models: dict[str, Model]
):
    model = models["qwen3_next"]
    size = state_slab(model)
    engine = make_engine(model, kv_memory_bytes=9 * size, slab_bytes=size)
    asked, *others = (some_ids(8, seed=seed) for seed in range(30))

    def computed_for(prompt: list[int]) -> int:
        before, sequence = engine.stats()["generator"].computed_tokens, engine.open("generator", prompt)
        read(engine, sequence, [5])
        release(engine, sequence)
        return engine.stats()["generator"].computed_tokens - before

    def read_once(token_ids: list[int]) -> None:
        sequence = engine.open("generator", [])
        read(engine, sequence, token_ids, [])
        release(engine, sequence)

    assert computed_for(asked) == len(asked) + 1
    for _ in range(2):
        for other in others:
            read_once(other)
        assert engine.stats()["generator"].evicted_blocks > 0, "they do not fit together"
        assert engine.kv_pool.free_slabs == 0
        assert computed_for([*asked, 6]) == 2, "its state is used, and kept again"


def test_tokens_that_were_never_computed_are_replaced_and_others_are_computed_from_the_start(
    make_engine: Callable[..., Engine], models: dict[str, Model], folders: dict[str, Path]
):
    engine, ids = make_engine(models["qwen3_5_text"], prefix_cache=False), some_ids(12)
    sequence = engine.open("generator", ids[:10])
    (child,) = generate(engine, sequence, GREEDY, tokens=3, delimiter="")
    text = [*ids[:10], *child.token_ids[:-1], 77]
    engine.append(child.sequence, [77], instead_of=1)
    before = engine.stats()["generator"].computed_tokens
    assert_logits_equal(read(engine, child.sequence, [78]), folders["qwen3_5_text"], [*text, 78], 1)
    assert engine.stats()["generator"].computed_tokens == before + 2
    engine.append(child.sequence, [79], instead_of=3)
    text = [*text[:11], 79]
    assert_logits_equal(read(engine, child.sequence, [80]), folders["qwen3_5_text"], [*text, 80], 1)
    assert engine.stats()["generator"].computed_tokens == before + 2 + len(text) + 1
    release(engine, sequence, child.sequence)


def test_a_beam_computes_each_token_once_and_holds_a_state_for_each_node_that_may_go_on(
    make_engine: Callable[..., Engine], models: dict[str, Model]
):
    engine, ids = make_engine(models["qwen3_5_text"]), some_ids(13)
    states = engine.admission.pools["generator/states"]
    beam, tree, unfinished = [engine.open("generator", ids, owner="search")], len(ids), 0
    for round_ in range(3):
        for n, node in enumerate(beam):
            keys = [Sampling(key=100 * round_ + 10 * n + i) for i in range(4)]
            engine.submit(Generate("search", node, tuple(keys), 6, ""))
        children: list[Generated] = []
        while engine.busy:
            children += [done for done in engine.step() if isinstance(done, Generated)]
            growing = engine.schedulers["generator"].running_branches
            assert states.live_blocks <= len(beam) + len(children) + growing, "forks share a state until they go on"
        assert states.live_blocks <= len(beam) + len(children)
        tree += sum(child.own_tokens for child in children)
        kept = children[:4]
        unfinished += len(children) - len(kept)  # their last tokens are never computed
        release(engine, *beam, *(child.sequence for child in children[4:]))
        beam = [child.sequence for child in kept]
    assert engine.stats()["generator"].computed_tokens == tree - unfinished - len(beam)
    release(engine, *beam)
    assert states.live_blocks == 0


@pytest.mark.parametrize("roles", [("generator", "verifier"), ("verifier", "generator")])
def test_a_recurrent_model_and_another_share_one_pool(
    roles: tuple[str, str],
    make_engine: Callable[..., Engine],
    models: dict[str, Model],
    load_model: Callable[[str], Model],
):
    of_role = dict(zip(roles, (models["qwen3_5_text"], load_model("qwen2-untied")), strict=True))
    engine = make_engine(of_role["generator"], of_role["verifier"])
    ids = some_ids(9)
    alone = {role: make_engine(model, prefix_cache=False) for role, model in of_role.items()}
    expected = {role: read(engine, engine.open("generator", ids), [5, 6]) for role, engine in alone.items()}
    opened = {role: engine.open(role, ids, owner=role) for role in roles}
    for role, sequence in opened.items():
        engine.submit(Score(role, sequence, (5, 6), (0, 1)))
    for done in drain(engine):
        assert isinstance(done, Scored)
        assert np.array_equal(done.values, expected[done.work.sequence.role])
    release(engine, *opened.values())
    for single in alone.values():
        single.abandon(None)
