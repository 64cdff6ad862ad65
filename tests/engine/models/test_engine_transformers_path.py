"""Decoders that run by transformers' own code over the engine's KV, against transformers alone."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_driver import drain, generate, read, release
from layer_weights import weights_of
from plain import plain_greedy, plain_logits, token_classifier
from safetensors.torch import load_file, save_file
from tiny_models import edit_tensors, train_tokenizer
from zoo_models import ODD, small_config, write_checkpoint

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError
from espalier.engine.memory.model_memory import model_bytes
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.config import NotNativeError
from espalier.engine.models.model import Model, language_model_head, load_generator, load_trunk
from espalier.engine.models.options import ModelImpl, Quantization
from espalier.engine.models.zoo.description import NEWEST, OLDEST
from espalier.engine.models.zoo.trial import random_model
from espalier.engine.work import Generate, Generated, Sampling, Score, Scored
from espalier.experiments.cli.operating.doctor import examine
from espalier.experiments.planning.inspection import inspect_checkpoint
from espalier.kernels.cpu import HAS_VNNI
from espalier.kernels.layout import KVShape
from espalier.prm.families import load_verifier
from espalier.prm.heads import take_token_rows
from espalier.search.run.settings import RuntimeSettings

KINDS = ["llama", "gemma3_text", "qwen3_moe", "gpt_oss", "olmo2", "phi3", "gpt2", "gemma2", "deepseek_v3"]
"""Model types: windows in some layers, experts, sinks, caps, learned positions, and values narrower than keys."""
NATIVE = ["llama", "gemma3_text", "phi3"]
SAME_BITS = ["llama", "gemma3_text", "qwen3_moe", "gpt_oss", "olmo2", "phi3", *(f"{kind} natively" for kind in NATIVE)]
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("zoo")
    return {kind: write_checkpoint(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, Model]:
    native = {f"{kind} natively": load(folders[kind], model_impl=ModelImpl.NATIVE) for kind in NATIVE}
    return {kind: load(folder) for kind, folder in folders.items()} | native


def load(folder: Path, **options: object) -> Model:
    checkpoint = Checkpoint(folder, **{"model_impl": ModelImpl.TRANSFORMERS} | options)  # type: ignore[arg-type]
    return load_generator(checkpoint, torch.float32, "cpu")


def some_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, 330, count).tolist()


def block_bytes(model: Model) -> int:
    """Bytes of a block of four tokens."""
    c = model.config
    return 2 * c.num_layers * c.num_kv_heads * c.head_dim * 4 * 4


def assert_logits_equal(logits: np.ndarray, folder: Path, token_ids: list[int], last: int) -> None:
    expected = plain_logits(folder, token_ids)[-last:]
    difference = (torch.from_numpy(logits[-last:]) - expected).abs().max() / expected.abs().max()
    assert difference < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_batch_tokens", [7, 64])
def test_prefill_in_chunks_and_decoding_equal_transformers(
    kind: str,
    max_batch_tokens: int,
    make_engine: Callable[..., Engine],
    models: dict[str, Model],
    folders: dict[str, Path],
):
    engine, ids = make_engine(models[kind], max_batch_tokens=max_batch_tokens), some_ids(31)
    sequence = engine.open("generator", ids[:5])
    assert_logits_equal(read(engine, sequence, ids[5:29]), folders[kind], ids[:29], 24)
    one_by_one = np.concatenate([read(engine, sequence, [token]) for token in ids[29:]])
    assert_logits_equal(one_by_one, folders[kind], ids, 2)
    release(engine, sequence)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what a process maps is told by Linux")
def test_nothing_of_a_running_model_lies_in_its_files(tmp_path: Path, make_engine: Callable[..., Engine]):
    """Whoever trains may write over them in place: a file that is cut short would end the process."""
    folder = write_checkpoint(tmp_path / "olmo2", "olmo2")
    engine = make_engine(load(folder))
    assert str(folder) not in Path("/proc/self/maps").read_text()
    sequence = engine.open("generator", [])
    before = read(engine, sequence, some_ids(9))
    (folder / "model.safetensors").write_bytes(b"")
    again = engine.open("generator", [])
    assert (read(engine, again, some_ids(9)) == before).all()
    release(engine, sequence, again)


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
    release(engine, sequence, done.sequence)


@pytest.mark.parametrize("kind", KINDS)
def test_forks_continue_each_on_its_own_and_prompts_are_cached(
    kind: str, make_engine: Callable[..., Engine], models: dict[str, Model], folders: dict[str, Path]
):
    engine, ids = make_engine(models[kind]), some_ids(10)
    parent = engine.open("generator", [])
    read(engine, parent, ids, [])
    family = [*engine.fork(parent, 3), parent]
    tails = [some_ids(count, seed=count) for count in (1, 2, 5, 11)]
    for sequence, tail in zip(family, tails, strict=True):
        engine.submit(Score("reader", sequence, tuple(tail), tuple(range(len(tail)))))
    by_row = {d.work.sequence.row: d.values for d in drain(engine) if isinstance(d, Scored)}
    for sequence, tail in zip(family, tails, strict=True):
        assert_logits_equal(by_row[sequence.row], folders[kind], ids + tail, len(tail))
    assert engine.stats()["generator"].copied_blocks
    release(engine, *family)
    for tail in ([77, 78], [79]):
        again = engine.open("generator", [*ids, *tails[3]])
        assert_logits_equal(read(engine, again, tail), folders[kind], [*ids, *tails[3], *tail], len(tail))
        release(engine, again)
    assert engine.stats()["generator"].cache_hits


@pytest.mark.parametrize("kind", SAME_BITS)
def test_a_sequence_has_the_same_bits_alone_and_in_company(
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


@pytest.mark.parametrize("kind", SAME_BITS)
def test_a_pool_that_holds_few_sequences_at_a_time_gives_the_same_bits(
    kind: str, make_engine: Callable[..., Engine], models: dict[str, Model]
):
    def run(blocks: int) -> tuple[dict[Hashable, tuple[list[int], float]], int]:
        size, texts = block_bytes(models[kind]), dict[Hashable, tuple[list[int], float]]()
        engine = make_engine(
            models[kind], max_batch_tokens=11, kv_memory_bytes=blocks * size, slab_bytes=size, reserved_share=0.01
        )
        each = {name: 12 if pool.window is None else 9 for name, pool in engine.admission.pools.items()}
        reserved = {f"search {i}": engine.admission.try_reserve(each, f"search {i}") for i in range(5)}
        prompts = {f"search {i}": engine.open("generator", some_ids(7 + i, i), owner=f"search {i}") for i in range(5)}
        for i, (owner, prompt) in enumerate(prompts.items()):
            engine.submit(Generate(owner, prompt, (Sampling(key=2 * i), Sampling(key=2 * i + 1)), 12, ""))
        while engine.busy:
            for done in engine.step():
                assert isinstance(done, Generated)
                texts[done.work.owner, done.indices] = list(done.token_ids), done.log_probability
                release(engine, done.sequence)
                if len([owner for owner, _ in texts if owner == done.work.owner]) == 2:
                    release(engine, prompts[done.work.owner])
                    engine.admission.release(reserved[done.work.owner])
        return texts, engine.stats()["generator"].preemptions

    roomy, _ = run(256)
    tight, preemptions = run(14)
    assert preemptions
    assert tight == roomy


@pytest.mark.parametrize("kind", SAME_BITS)
def test_generation_that_was_preempted_has_the_same_bits(
    kind: str, make_engine: Callable[..., Engine], models: dict[str, Model]
):
    def run(preempted_after: set[int]) -> dict[tuple[int, ...], tuple[list[int], float]]:
        engine, texts, steps = make_engine(models[kind], max_batch_tokens=9), {}, 0
        sequence = engine.open("generator", some_ids(12), owner="search")
        engine.submit(Generate("search", sequence, tuple(Sampling(key=key) for key in range(4)), 14, ""))
        while engine.busy:
            for done in engine.step():
                assert isinstance(done, Generated)
                texts[done.indices] = list(done.token_ids), done.log_probability
                release(engine, done.sequence)
            steps += 1
            if steps in preempted_after:
                engine.suspend("search")
                assert engine.stats()["generator"].live_blocks == 0
                engine.resume_owner("search")
        release(engine, sequence)
        return texts

    assert run({1, 4, 9}) == run(set())


@pytest.mark.parametrize("kind", KINDS)
def test_int8_weights_stay_near_float32(
    kind: str, make_engine: Callable[..., Engine], models: dict[str, Model], folders: dict[str, Path]
):
    pytest.importorskip("torchao")
    model = load(folders[kind], quantization=Quantization.INT8)
    assert model.weight_bytes < 0.6 * models[kind].weight_bytes
    engine, ids = make_engine(model), some_ids(20)
    sequence = engine.open("generator", [])
    logits, exact = torch.from_numpy(read(engine, sequence, ids)), plain_logits(folders[kind], ids)
    assert torch.cosine_similarity(logits.flatten(), exact.flatten(), dim=0) > 0.99
    release(engine, sequence)


@pytest.mark.skipif(not HAS_VNNI, reason="this processor has no AVX-512 VNNI")
@pytest.mark.parametrize("kv_heads", [2, 3])
def test_values_that_three_heads_share_are_rounded_least(kv_heads: int, tmp_path: Path):
    pytest.importorskip("torchao")
    folder = write_checkpoint(tmp_path, "gemma3_text", sizes=dataclasses.replace(ODD, kv_heads=kv_heads))
    x, refined = torch.randn(5, 64), 1 if kv_heads == 2 else 0
    weights = load_file(folder / "model.safetensors")
    exact = x[:, :48] @ weights["model.layers.0.self_attn.v_proj.weight"].T
    attention: Any = load(folder, quantization=Quantization.INT8).decoder.layers.model.layers[0].self_attn  # type: ignore[attr-defined]
    native = load(folder, model_impl=ModelImpl.NATIVE, quantization=Quantization.INT8).decoder.layers
    x[:, 48:] = 0
    for weight in (attention.q_proj.product.linear.weight, weights_of(native, 0).qkv):
        assert weight.refined == refined
        values = torch.nn.functional.linear(x, weight)[:, -len(exact.T) :]
        assert ((values - exact).norm() / exact.norm() < 0.006) == bool(refined)


def test_each_model_says_what_runs_it(folders: dict[str, Path]):
    assert Checkpoint(folders["llama"]).decoder_config.impl is ModelImpl.NATIVE
    assert Checkpoint(folders["gemma3_text"]).decoder_config.impl is ModelImpl.NATIVE
    assert Checkpoint(folders["olmo2"]).decoder_config.impl is ModelImpl.TRANSFORMERS
    forced = Checkpoint(folders["llama"], model_impl=ModelImpl.TRANSFORMERS)
    assert forced.decoder_config.impl is ModelImpl.TRANSFORMERS
    with pytest.raises(CheckpointError, match="'olmo2' is not supported"):
        _ = Checkpoint(folders["olmo2"], model_impl=ModelImpl.NATIVE).decoder_config


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("gemma3_text", "final_logit_softcapping", 30.0),
        ("gemma3_text", "attn_logit_softcapping", 50.0),
        ("llama", "mlp_bias", True),
        ("llama", "hidden_act", "relu"),
    ],
)
def test_what_native_code_of_a_family_has_not_runs_by_transformers_code(
    kind: str, field: str, value: object, make_engine: Callable[..., Engine], tmp_path: Path
):
    folder = write_checkpoint(tmp_path / kind, kind, **{field: value})
    checkpoint = Checkpoint(folder)
    assert checkpoint.decoder_config.impl is ModelImpl.TRANSFORMERS
    engine, ids = make_engine(load_generator(checkpoint, torch.float32, "cpu")), some_ids(12)
    sequence = engine.open("generator", [])
    assert_logits_equal(read(engine, sequence, ids), folder, ids, 12)
    release(engine, sequence)
    with pytest.raises(NotNativeError, match="not supported"):
        _ = Checkpoint(folder, model_impl=ModelImpl.NATIVE).decoder_config


@pytest.mark.parametrize("kind", NATIVE)
def test_both_codes_give_the_same_logits(
    kind: str, make_engine: Callable[..., Engine], models: dict[str, Model], folders: dict[str, Path]
):
    ids = some_ids(40, seed=2)
    for model in (models[kind], models[f"{kind} natively"]):
        engine = make_engine(model, max_batch_tokens=9)
        sequence = engine.open("generator", [])
        assert_logits_equal(read(engine, sequence, ids), folders[kind], ids, 40)
        release(engine, sequence)


def test_doctor_and_log_name_the_code_that_runs_a_model(folders: dict[str, Path], caplog: pytest.LogCaptureFixture):
    runtime = RuntimeSettings(generator=str(folders["olmo2"]), verifier=str(folders["llama"]))
    found = {finding.name: finding.value for finding in examine(runtime=runtime)}
    assert found[str(folders["olmo2"])].endswith("run by transformers code")
    assert found[str(folders["llama"])].endswith("run by native code")
    runtime = RuntimeSettings(generator=str(folders["gemma3_text"]), verifier=str(folders["phi3"]))
    found = {finding.name: finding.value for finding in examine(runtime=runtime)}
    assert found[str(folders["gemma3_text"])].endswith("run by native code")
    assert found[str(folders["phi3"])].endswith("run by native code")
    with caplog.at_level("INFO", logger="espalier.engine"):
        load(folders["olmo2"])
        load_generator(Checkpoint(folders["llama"]), torch.float32, "cpu")
    assert "runs by transformers' Olmo2ForCausalLM" in caplog.text
    assert "runs by native code" in caplog.text


def test_kv_takes_the_room_of_its_own_heads_and_widths(models: dict[str, Model], make_engine: Callable[..., Engine]):
    assert set(models["deepseek_v3"].config.kv_layers) == {KVShape(6, 12, 4, None)}, "values narrower than keys"
    engine = make_engine(models["gemma3_text"])
    windowed, whole = engine.schedulers["generator"].pools
    assert (windowed.window, windowed.layout.num_layers, whole.window, whole.layout.num_layers) == (5, 2, None, 2)
    sequence = engine.open("generator", some_ids(100))
    read(engine, sequence, [5], [0])
    assert windowed.live_blocks <= 3
    assert whole.live_blocks == 26
    assert engine.stats()["generator"].live_bytes == windowed.live_bytes + whole.live_bytes
    release(engine, sequence)


def test_a_window_is_that_of_its_layer(folders: dict[str, Path]):
    assert Checkpoint(folders["gemma3_text"]).decoder_config.windows == (5, None, 5, None)
    assert Checkpoint(folders["gpt_oss"]).decoder_config.windows == (5, None, 5, None)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("recurrent_gemma", "its layers keep a recurrent state"),
        ("zaya", "its ZayaCCAProjection keeps a recurrent state of an unknown kind"),
        ("bloom", "it computes attention inline"),
        ("bert", "its attention is not causal"),
        ("doge", "it makes an attention mask of its own"),
        ("inkling_text", "it passes position_bias to attention, which is not known"),
    ],
)
def test_a_decoder_that_cannot_run_so_is_refused_with_the_reason(kind: str, reason: str, tmp_path: Path):
    small_config(kind).save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text().replace('"architectures": null', '"architectures": ["XForCausalLM"]')
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    checkpoint = Checkpoint(tmp_path)
    checkpoint.config["architectures"] = ["XForCausalLM"]
    with pytest.raises(CheckpointError, match=f"cannot run on Espalier's attention: {reason}"):
        _ = checkpoint.decoder_config


def test_a_type_that_nobody_knows_is_refused_and_its_code_is_not_run(folders: dict[str, Path]):
    checkpoint = Checkpoint(folders["gemma3_text"])
    checkpoint.config |= {"model_type": "made-up", "auto_map": {"AutoConfig": "evil.Config"}}
    with pytest.raises(CheckpointError, match="'made-up' is known neither to Espalier nor to transformers"):
        _ = checkpoint.decoder_config


@pytest.mark.parametrize("impl", [ModelImpl.NATIVE, ModelImpl.TRANSFORMERS])
def test_code_beside_a_checkpoint_is_never_run(impl: ModelImpl, tmp_path: Path):
    folder, ran = write_checkpoint(tmp_path / "model", "llama"), tmp_path / "ran"
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    load(folder, model_impl=impl)
    assert not ran.exists()


def test_the_versions_that_run_decoders_are_those_that_can_be_installed():
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    major, minor = NEWEST.split(".")
    assert f'"transformers>={OLDEST},<{major}.{int(minor) + 1}"' in text


@pytest.mark.parametrize("version", ["5.19.3", "5.25.0", "6.0.0rc1"])
def test_a_transformers_that_was_not_tested_is_refused_where_it_would_run(
    version: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("espalier.engine.models.zoo.description.version", lambda _: version)
    with pytest.raises(CheckpointError, match=rf"transformers {version} is installed; .* pip install"):
        load(folders["gemma3_text"])
    load_generator(Checkpoint(folders["llama"]), torch.float32, "cpu")


def test_the_native_path_imports_no_modelling_code(tiny_checkpoints: dict[str, Path]):
    program = (
        "import sys, torch, pathlib;"
        "from espalier.engine.models.checkpoint import Checkpoint;"
        "from espalier.engine.models.model import load_generator;"
        "load_generator(Checkpoint(pathlib.Path(sys.argv[1])), torch.float32, 'cpu');"
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(tiny_checkpoints["qwen2-tied"])], check=True)


@pytest.mark.parametrize("impl", ModelImpl)
@pytest.mark.parametrize("named_as_on_the_hub", [True, False])
def test_the_text_half_of_a_checkpoint_with_images_is_loaded(
    impl: ModelImpl,
    named_as_on_the_hub: bool,
    tmp_path: Path,
    make_engine: Callable[..., Engine],
    caplog: pytest.LogCaptureFixture,
):
    vision = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=small_config("gemma3_text").to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    random_model(transformers.Gemma3ForConditionalGeneration, config).save_pretrained(tmp_path)
    train_tokenizer().save_pretrained(tmp_path)
    if named_as_on_the_hub != any(name.startswith("language_model.") for name in Checkpoint(tmp_path).tensors):
        file, tensors = tmp_path / "model.safetensors", load_file(tmp_path / "model.safetensors")
        save_file({other_name(name): tensor for name, tensor in tensors.items()}, file, {"format": "pt"})
    with caplog.at_level("INFO", "espalier.engine"):
        model = load_generator(Checkpoint(tmp_path, model_impl=impl), torch.float32, "cpu")
    assert re.search(r"\d+ tensors of .* are not its text half's: .*(multi_modal_projector|vision_tower)", caplog.text)
    assert (model.config.impl is ModelImpl.TRANSFORMERS) == (impl is ModelImpl.TRANSFORMERS)
    engine, ids = make_engine(model), some_ids(20)
    sequence = engine.open("generator", [])
    assert_logits_equal(read(engine, sequence, ids), tmp_path, ids, 20)
    release(engine, sequence)


def other_name(name: str) -> str:
    """A tensor's name in older checkpoints with images by its name in new ones, or the other way round."""
    for old, new in (("language_model.model.", "model.language_model."), ("vision_tower.", "model.vision_tower.")):
        for one, other in ((new, old), (old, new)):
            if name.startswith(one):
                return other + name.removeprefix(one)
    return name


def test_a_token_classifier_scores_on_any_decoder(tmp_path: Path, make_engine: Callable[..., Engine]):
    folder = write_checkpoint(tmp_path, "gemma2", transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING)
    family = load_verifier(Checkpoint(folder), torch.float32, "cpu")
    engine, ids = make_engine(verifier=family.model), some_ids(12)
    sequence = engine.open("verifier", [])
    engine.submit(Score("reader", sequence, tuple(ids), (3, 11)))
    (done,) = drain(engine)
    assert isinstance(done, Scored)
    with torch.inference_mode():
        expected = torch.softmax(token_classifier(folder)(torch.tensor([ids])).logits[0], dim=-1)[[3, 11], 1]
    assert done.values[:, 0] == pytest.approx(expected.tolist(), abs=1e-5)
    release(engine, sequence)


def test_a_yes_no_verifier_reads_capped_logits(folders: dict[str, Path], make_engine: Callable[..., Engine]):
    checkpoint = Checkpoint(folders["gemma2"])
    decoder = load_trunk(checkpoint, torch.float32, "cpu")
    rows = take_token_rows(checkpoint, decoder, [7, 9])
    hidden = torch.randn(3, decoder.config.hidden_size)
    assert torch.equal(rows(hidden), language_model_head(checkpoint, decoder)(hidden)[:, [7, 9]])
    assert rows(100 * hidden).abs().max() <= 5, "final_logit_softcapping"


@pytest.mark.parametrize("kind", KINDS)
def test_inspection_gives_the_sizes_that_loading_gives(kind: str, folders: dict[str, Path], models: dict[str, Model]):
    found = inspect_checkpoint(
        str(folders[kind]), torch.float32, runtime=RuntimeSettings(model_impl=ModelImpl.TRANSFORMERS)
    )
    assert found.config == models[kind].config
    assert found.kv_bytes_per_token == sum(layer.elements for layer in models[kind].config.kv_layers) * 4
    estimate = model_bytes(found.config, torch.float32, Quantization.NONE, generates=True)
    assert 0.75 * models[kind].weight_bytes < estimate <= models[kind].weight_bytes, "last panels are filled up"


def test_a_tensor_that_is_missing_or_unused_or_misshapen_is_named(folders: dict[str, Path], tmp_path: Path):
    folder = shutil.copytree(folders["olmo2"], tmp_path / "olmo2")
    norm = "model.layers.1.self_attn.q_norm.weight"
    changes: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({norm: None}, f"has no tensors for {norm}"),
        ({norm: torch.ones(3)}, f"{norm} has shape \\(3,\\)"),
        ({"model.layers.1.more.weight": torch.ones(3)}, "holds 1 tensors .* does not use: model.layers.1.more.weight"),
        ({norm: torch.full((48,), torch.nan)}, "not finite"),
    ]
    for change, complaint in changes:
        shutil.copy(folders["olmo2"] / "model.safetensors", folder)
        edit_tensors(folder / "model.safetensors", change)
        with pytest.raises(CheckpointError, match=complaint):
            load_generator(Checkpoint(folder), torch.float32, "cpu")
