import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import edit_json, edit_tensors
from tokenizers import Tokenizer, models
from transformers import Qwen2Config, Qwen2ForCausalLM

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Outline
from espalier.engine.models.options import LoadFormat, Quantization
from espalier.experiments.planning.inspection import inspect_checkpoint, paths_that_fit
from espalier.prm.families import identify
from espalier.search.run.settings import RuntimeSettings

QWEN_1_5B = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
MATH_PRM_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}


def on_paper(folder: Path, architecture: str, shape: dict) -> Path:
    """A checkpoint without weights: its configuration and a vocabulary that has the published mark."""
    folder.mkdir()
    config = {"architectures": [architecture], "model_type": "qwen2", "rms_norm_eps": 1e-6, **shape}
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer(models.WordLevel({"[UNK]": 0, "<extra_0>": 151651}, unk_token="[UNK]")).save(
        str(folder / "tokenizer.json")
    )
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def parameters(shape: dict) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Qwen2ForCausalLM(Qwen2Config(**shape)).parameters())


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return (
        on_paper(tmp_path / "generator", "Qwen2ForCausalLM", QWEN_1_5B),
        on_paper(tmp_path / "verifier", "Qwen2ForProcessRewardModel", MATH_PRM_7B),
    )


def test_a_pair_is_planned_on_paper_within_two_percent_of_its_tensors(pair: tuple[Path, Path]):
    generator, verifier = (inspect_checkpoint(str(folder), torch.bfloat16) for folder in pair)
    assert generator.weight_bytes == 2 * parameters(QWEN_1_5B)
    without_lm_head = parameters(MATH_PRM_7B) - 152064 * 3584
    head = 3584 * 3584 + 3584 + 2 * 3584 + 2
    assert verifier.weight_bytes == pytest.approx(2 * (without_lm_head + head), rel=0.02)
    assert (generator.kv_bytes_per_token, verifier.kv_bytes_per_token) == (28_672, 57_344)
    assert not generator.has_weights
    assert verifier.match is not None
    assert verifier.match.info.name == "qwen2.5-math-prm"


def test_an_index_without_its_shards_is_no_weights(pair: tuple[Path, Path]):
    _, folder = pair
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00004.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not inspect_checkpoint(str(folder), torch.bfloat16).has_weights


def test_families_that_tensors_tell_are_told_without_weights(tmp_path: Path):
    skywork = on_paper(tmp_path / "skywork", "Qwen2ForPrmModel", {**MATH_PRM_7B, "vocab_size": 151936})
    Tokenizer(models.WordLevel({"[UNK]": 0, "Ċ": 198}, unk_token="[UNK]")).save(str(skywork / "tokenizer.json"))
    match = identify(Outline(skywork, LoadFormat.DUMMY))
    assert match.info.name == "skywork-o1-open-prm"
    assert "tensor" not in match.reason


def test_a_pair_fits_a_card_of_24_gigabytes_and_quantised_one_of_12(pair: tuple[Path, Path]):
    whole = [inspect_checkpoint(str(folder), torch.bfloat16) for folder in pair]
    left, paths = paths_that_fit(whole, 24 * 2**30, 1024)
    assert left == int(24 * 2**30 * 0.95) - sum(i.weight_bytes for i in whole)
    assert paths == left // (1024 * (28_672 + 57_344))
    assert paths_that_fit(whole, 12 * 2**30, 1024) == (0, 0)
    small = [inspect_checkpoint(str(folder), torch.bfloat16, Quantization.INT8) for folder in pair]
    assert paths_that_fit(small, 12 * 2**30, 1024)[1] > 0
    smaller = [inspect_checkpoint(str(folder), torch.bfloat16, Quantization.INT4) for folder in pair]
    assert 0.25 < sum(i.weight_bytes for i in smaller) / sum(i.weight_bytes for i in whole) < 0.5


@pytest.mark.parametrize("name", ["qwen2-untied", "qwen3-biased", "mistral-window"])
def test_a_generators_weights_are_the_sum_of_its_tensors(name: str, tiny_checkpoints: dict[str, Path]):
    found = inspect_checkpoint(str(tiny_checkpoints[name]), torch.float32)
    with safe_open(tiny_checkpoints[name] / "model.safetensors", framework="pt") as tensors:
        assert found.weight_bytes == sum(tensors.get_tensor(key).nbytes for key in tensors.keys())  # noqa: SIM118
    assert (found.role, found.match, found.has_weights, found.readings) == ("generator", None, True, ())


def test_an_adapter_is_named_beside_its_base(espalier, tiny_checkpoints: dict[str, Path], tmp_path: Path):
    base, rows = tiny_checkpoints["qwen2-tied"], "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    shape = Outline(base).shape("model.layers.0.self_attn.q_proj.weight")
    assert shape
    told = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": str(base), "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(told))
    tensors = {rows.format("A"): torch.zeros(2, shape[1]), rows.format("B"): torch.zeros(shape[0], 2)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    for name in (f"{base}+{tmp_path}", str(tmp_path)):
        (found,) = json.loads(espalier("models", "inspect", name, "--json").out)["checkpoints"]
        assert (found["folder"], found["adapter"]) == (str(base), str(tmp_path))
    shown = " ".join(espalier("models", "inspect", f"{base}+{tmp_path}").out.split())
    assert f"{tmp_path.name}, merged as it loads" in shown
    assert inspect_checkpoint(str(base), torch.float32).adapter is None


def test_a_verifier_is_shown_with_its_family_and_where_it_is_read(tiny_checkpoints: dict[str, Path]):
    found = inspect_checkpoint(str(tiny_checkpoints["math-prm"]), torch.float32)
    assert found.role == "verifier"
    assert [token for _, token in found.readings] == ["<extra_0>", "<extra_0>"]
    assert [before.endswith(step) for (before, _), step in zip(found.readings, ("= 5", "= 9"), strict=True)] == [
        True
    ] * 2
    assert "Please reason step by step" in found.prompt


def test_a_family_named_by_its_flag_makes_a_verifier_of_what_may_be_a_generator(tiny_checkpoints: dict[str, Path]):
    name = str(tiny_checkpoints["qwen2-untied"])
    assert inspect_checkpoint(name, torch.float32).role == "generator"
    with pytest.raises(CheckpointError, match=r"score"):
        inspect_checkpoint(name, torch.float32, runtime=RuntimeSettings(verifier_family="qwen2.5-math-prm"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"model.norm.weight": None}, "has no tensor 'model.norm.weight'"),
        ({"model.extra": torch.zeros(2)}, "does not use: model.extra"),
        ({"model.norm.weight": torch.zeros(3)}, r"shape \(3,\), config.json means \(48,\)"),
    ],
)
def test_what_would_be_wrong_when_it_is_loaded_is_found(
    damage: dict[str, torch.Tensor | None], message: str, copy_of: Callable[[str], Path]
):
    folder = copy_of("qwen2-untied")
    edit_tensors(folder / "model.safetensors", damage)
    with pytest.raises(CheckpointError, match=message):
        inspect_checkpoint(str(folder), torch.float32)


def test_weights_that_are_cut_short_are_not_taken_for_none(copy_of: Callable[[str], Path]):
    file = copy_of("qwen2-untied") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="cut short"):
        inspect_checkpoint(str(file.parent), torch.float32)


def test_no_weight_is_read(tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a weight was read")

    for kind in ("SafetensorsFile", "BinFile"):
        monkeypatch.setattr(f"espalier.engine.models.weights.{kind}.read", refuse, raising=False)
    for name in ("qwen2-tied", "classifier"):
        assert inspect_checkpoint(str(tiny_checkpoints[name]), torch.float32).weight_bytes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"},
            "RwkvForCausalLM cannot run on Espalier's attention: its layers keep a recurrent state",
        ),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "has no tensors for transformer.h.0"),
        ({"architectures": ["Qwen2ForQuestionAnswering"]}, "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"),
    ],
)
def test_an_unsupported_model_is_an_error_with_the_reason(
    config: dict[str, Any], message: str, copy_of: Callable[[str], Path]
):
    folder = copy_of("qwen2-untied")
    edit_json(folder / "config.json", config)
    with pytest.raises(CheckpointError, match=message) as error:
        inspect_checkpoint(str(folder), torch.float32)
    assert len(str(error.value).replace(str(folder), "")) < 400


def test_a_generator_is_shown_with_the_families_that_a_flag_would_make_it(tiny_checkpoints: dict[str, Path]):
    found = inspect_checkpoint(str(tiny_checkpoints["qwen2-untied"]), torch.float32)
    assert found.role == "generator"
    families = "eurus-prm, thinkprm, yes-no, judge, likelihood, likelihood-ratio"
    assert found.note == f"also a verifier if --verifier-family names one of {families}"
