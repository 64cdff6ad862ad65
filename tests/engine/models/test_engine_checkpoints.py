import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_weights import weights_of
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, edit_tensors

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.families import parse_decoder_config
from espalier.engine.models.hub import locate
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import LoadFormat, Quantization
from espalier.experiments.planning.inspection import inspect_checkpoint

QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LATE_WINDOW = {"model_type": "qwen2", "sliding_window": 7, "max_window_layers": 1}


def load(folder: Path) -> Model:
    return load_generator(Checkpoint(folder), torch.float32, "cpu")


@pytest.mark.parametrize(
    "tensor",
    [
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_missing_tensor_is_named(tensor: str, copy_of: Callable[[str], Path]):
    folder = copy_of("qwen2-untied")
    edit_tensors(folder / "model.safetensors", {tensor: None})
    with pytest.raises(CheckpointError, match=r"no tensor '.*" + tensor.removeprefix("model.")):
        load(folder)


@pytest.mark.parametrize("tensor", ["model.layers.3.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.bias"])
def test_a_tensor_that_nothing_uses_is_named(tensor: str, copy_of: Callable[[str], Path]):
    folder = copy_of("qwen2-untied")
    edit_tensors(folder / "model.safetensors", {tensor: torch.zeros(48)})
    with pytest.raises(CheckpointError, match=rf"1 tensors that Qwen2ForCausalLM does not use: {tensor}"):
        load(folder)


def test_fewer_layers_in_the_configuration_than_in_the_weights_is_an_error(copy_of: Callable[[str], Path]):
    folder = copy_of("qwen2-untied")
    edit_json(folder / "config.json", {"num_hidden_layers": 2})
    with pytest.raises(CheckpointError, match="does not use"):
        load(folder)


@pytest.mark.parametrize("changes", [{"vocab_size": 400}, {"num_key_value_heads": 1}, {"hidden_size": 64}])
def test_a_configuration_of_another_shape_than_the_weights_is_an_error(
    changes: dict[str, Any], copy_of: Callable[[str], Path]
):
    folder = copy_of("qwen2-untied")
    edit_json(folder / "config.json", changes)
    with pytest.raises(CheckpointError, match="has shape"):
        load(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, 20_000])
def test_a_truncated_weight_file_is_called_damaged(kept: int, copy_of: Callable[[str], Path]):
    folder = copy_of("qwen2-untied")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="damaged or cut short"):
        load(folder)


def test_a_folder_without_weights_is_named(copy_of: Callable[[str], Path]):
    folder = copy_of("qwen2-untied")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        load(folder)


def test_a_folder_without_a_configuration_is_not_a_checkpoint(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        Checkpoint(tmp_path)


def test_a_broken_configuration_file_is_named(copy_of: Callable[[str], Path]):
    folder = copy_of("qwen2-untied")
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, r"has no tokenizer\.json"), ("{}", "is not a tokenizer"), ("{", r"tokenizer\.json is not valid JSON")],
)
def test_a_missing_or_broken_tokenizer_is_named(content: str | None, message: str, copy_of: Callable[[str], Path]):
    folder = copy_of("qwen2-untied")
    file = folder / "tokenizer.json"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize("name", ["math-prm", "classifier"])
def test_a_process_reward_model_given_as_generator_is_refused(name: str, tiny_checkpoints: dict[str, Path]):
    with pytest.raises(CheckpointError, match=r"not a generator.*--generator"):
        load(tiny_checkpoints[name])


def test_sharded_weights_load_like_a_single_file(copy_of: Callable[[str], Path], load_model: Callable[[str], Model]):
    folder = copy_of("qwen2-untied")
    file = folder / "model.safetensors"
    names = sorted(tensors := load_file(file))
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / shard)
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    file.unlink()
    sharded, single = load(folder), load_model("qwen2-untied")
    for index in range(len(single.decoder.layers)):
        mine, theirs = (weights_of(model.decoder.layers, index) for model in (sharded, single))
        assert torch.equal(mine.qkv, theirs.qkv)
        assert torch.equal(mine.down, theirs.down)
    assert sharded.digest != single.digest


def test_a_missing_shard_is_named(copy_of: Callable[[str], Path]):
    folder = copy_of("qwen2-untied")
    index = {"weight_map": {"lm_head.weight": "model-9.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"has no model-9\.safetensors"):
        load(folder)


def test_a_trunk_without_the_model_prefix_loads(copy_of: Callable[[str], Path], load_model: Callable[[str], Model]):
    folder = copy_of("qwen2-untied")
    file = folder / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file)
    assert torch.equal(load(folder).decoder.embedding, load_model("qwen2-untied").decoder.embedding)


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_is_the_embedding_unless_another_one_is_stored(
    same: bool, copy_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
):
    folder = copy_of("qwen2-tied")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    head = embedding if same else embedding.flip(0)
    edit_tensors(folder / "model.safetensors", {"lm_head.weight": head.clone()})
    model, hidden = load(folder), torch.randn(4, 32)
    torch.testing.assert_close(model.head(hidden), hidden @ head.T)
    assert ("tie_word_embeddings in config.json" in caplog.text) is not same
    assert bool(inspect_checkpoint(str(folder), torch.float32).warnings) is not same


@pytest.mark.parametrize("changed", ["model.safetensors", "config.json", "tokenizer_config.json", "tokenizer.json"])
def test_the_digest_is_over_all_that_results_depend_on(
    changed: str, copy_of: Callable[[str], Path], tiny_checkpoints: dict[str, Path]
):
    folder = copy_of("qwen2-tied")
    (folder / "README.md").write_text("of no consequence")
    before = Checkpoint(folder).digest()
    assert before == Checkpoint(tiny_checkpoints["qwen2-tied"]).digest()
    if changed == "model.safetensors":
        edit_tensors(folder / changed, {"model.norm.weight": torch.zeros(32)})
    else:
        edit_json(folder / changed, {"chat_template": "{{ messages }}"})
    assert Checkpoint(folder).digest() != before
    assert Checkpoint(folder, quantization=Quantization.INT8).digest() != Checkpoint(folder).digest()


def test_dummy_weights_have_a_digest_of_their_own(copy_of: Callable[[str], Path]):
    folder = copy_of("qwen2-tied")
    dummy = Checkpoint(folder, LoadFormat.DUMMY).digest()
    assert dummy != Checkpoint(folder).digest()
    edit_json(folder / "config.json", {"rope_theta": 123.0})
    assert Checkpoint(folder, LoadFormat.DUMMY).digest() != dummy


def test_a_hub_blobs_name_is_its_digest(copy_of: Callable[[str], Path], tmp_path: Path):
    folder = copy_of("qwen2-tied")
    file = folder / "model.safetensors"
    plain = Checkpoint(folder).digest()
    blob = tmp_path / hashlib.sha256(file.read_bytes()).hexdigest()
    file.rename(blob)
    file.symlink_to(blob)
    assert Checkpoint(folder).digest() == plain


def test_ends_of_sequence_come_from_both_configurations(copy_of: Callable[[str], Path]):
    folder = copy_of("qwen2-untied")
    edit_json(folder / "config.json", {"eos_token_id": 7})
    edit_json(folder / "generation_config.json", {"eos_token_id": [9, 2]})
    assert load(folder).eos_token_ids == (0, 2, 7, 9)


def test_locate_takes_a_folder_and_refuses_an_unknown_name(tmp_path: Path):
    assert locate(str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match=r"no checkpoint 'nothing-here'.*demo-generator"):
        locate("nothing-here")


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "~nobody-of-this-name/model", "\ud800", "/dev/zero", "org/.."])
def test_a_name_that_no_checkpoint_can_have_is_refused_as_one(name: str):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        locate(name)


def test_transformers_4_and_5_spell_the_rotary_parameters_differently():
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    old = parse_decoder_config({**QWEN2, "rope_theta": 5e5, "rope_scaling": llama3})
    new = parse_decoder_config({**QWEN2, "rope_parameters": {**llama3, "rope_theta": 5e5}})
    assert old == new
    assert (new.rope_theta, new.rotaries[0].scaling["rope_type"]) == (5e5, "llama3")
    older = parse_decoder_config({**QWEN2, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert older.rotaries[0].scaling["rope_type"] == "linear"


def test_a_configuration_without_rotary_scaling_has_none():
    assert parse_decoder_config({**QWEN2, "rope_theta": 1e6, "rope_scaling": None}).rotaries[0].scaling is None
    assert parse_decoder_config({**QWEN2, "rope_theta": 1e6}).rope_theta == 1e6
    assert parse_decoder_config({**QWEN2, "rope_parameters": {"rope_type": "default"}}).rotaries[0].scaling is None


def test_what_a_configuration_leaves_out_has_the_usual_meaning():
    config = parse_decoder_config({k: v for k, v in QWEN2.items() if k != "num_key_value_heads"})
    assert (config.num_kv_heads, config.head_dim, config.tied) == (4, 16, False)
    assert config.attention_bias
    assert not parse_decoder_config({**QWEN2, "model_type": "llama"}).attention_bias


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mamba"},
            r"'mamba' is not supported; llama, mistral, qwen2, qwen3, .* are",
        ),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "'longrope' lack short_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 7}}, "a list of 8 numbers above 0"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "'ntk' is not supported; default, linear"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_unsupported_features_are_refused_by_name(changes: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        parse_decoder_config({**QWEN2, **changes})


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 7}, (7, 7, 7)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None, None)),
        ({"model_type": "mistral"}, (4096, 4096, 4096)),
        (LATE_WINDOW, (None, None, None)),
        (
            {"model_type": "qwen2", "sliding_window": 7, "max_window_layers": 1, "use_sliding_window": True},
            (None, 7, 7),
        ),
        ({"model_type": "qwen2", "use_sliding_window": True}, (None, None, None)),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (9, None, 9),
        ),
        ({"model_type": "llama", "sliding_window": 7}, (None, None, None)),
    ],
)
def test_each_layers_window_is_as_its_family_means_it(raw: dict[str, Any], windows: tuple[int | None, ...]):
    assert parse_decoder_config({**QWEN2, "num_hidden_layers": 3, **raw}).windows == windows


def test_yarn_takes_what_it_is_not_told_from_the_longest_context():
    config = parse_decoder_config(
        {
            **QWEN2,
            "max_position_embeddings": 128,
            "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 32},
        }
    )
    assert config.rotaries[0].scaling == {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 32,
        "factor": 4.0,
    }


@pytest.mark.parametrize(
    ("rope", "lacking"),
    [
        ({"rope_type": "linear"}, "'linear' lack factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' lack low_freq_factor, high_freq_factor"),
    ],
)
def test_what_rotary_parameters_lack_is_named(rope: dict[str, Any], lacking: str):
    with pytest.raises(CheckpointError, match=lacking):
        parse_decoder_config({**QWEN2, "rope_scaling": rope})


def test_a_missing_key_is_named():
    with pytest.raises(CheckpointError, match="lacks 'hidden_size'"):
        parse_decoder_config({k: v for k, v in QWEN2.items() if k != "hidden_size"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "x"}, "hidden_size in config.json must be a whole number from 1 on, is 'x'"),
        ({"hidden_size": None}, "hidden_size .* is None"),
        ({"hidden_size": 2}, "hidden_size 2 in config.json cannot be divided among 4 heads"),
        ({"vocab_size": 10.5}, "vocab_size .* is 10.5"),
        ({"intermediate_size": -1}, "intermediate_size .* is -1"),
        ({"num_hidden_layers": True}, "num_hidden_layers .* is True"),
        ({"num_attention_heads": 0}, "num_attention_heads .* is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads .* is 0"),
        ({"head_dim": [16]}, r"head_dim .* is \[16\]"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings .* is 'long'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps in config.json must be a number above 0, is 'small'"),
        ({"rope_theta": 0}, "rope_theta .* is 0"),
        ({"rope_scaling": "yarn"}, "rope_scaling in config.json must be an object, is 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor .* is '2'"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 0}}, "original_max.* is 0"),
        ({"model_type": ["qwen2"]}, r"\['qwen2'\] is not supported"),
        ({"model_type": "mistral", "sliding_window": "all"}, "sliding_window .* is 'all'"),
        ({"use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers .* from 0 on, is 'x'"),
        ({"use_sliding_window": True, "layer_types": 7}, "layer_types .* is 7"),
    ],
)
def test_a_value_that_means_nothing_is_named_with_its_field(changes: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        parse_decoder_config({**QWEN2, **changes})
