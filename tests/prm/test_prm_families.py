from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import hf_tokenizer
from safetensors.torch import load_file
from tiny_models import edit_json, edit_tensors

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import load_generator
from espalier.prm.base import PrmFamily, StepPath
from espalier.prm.families import load_verifier


def load(folder: Path) -> PrmFamily:
    return load_verifier(Checkpoint(folder), torch.float32, "cpu")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("classifier", "score.weight"),
        ("math-prm", "score.0.weight"),
        ("math-prm", "score.0.bias"),
        ("math-prm", "score.2.weight"),
        ("math-prm", "score.2.bias"),
    ],
)
def test_a_missing_head_tensor_is_an_error_and_never_a_random_head(
    name: str, tensor: str, copy_of: Callable[[str], Path]
):
    folder = copy_of(name)
    edit_tensors(folder / "model.safetensors", {tensor: None})
    with pytest.raises(CheckpointError, match=f"no tensor '{tensor}'"):
        load(folder)


@pytest.mark.parametrize("labels", [1, 3])
def test_a_classifier_with_another_number_of_labels_is_refused(labels: int, copy_of: Callable[[str], Path]):
    folder = copy_of("classifier")
    head = {"score.weight": torch.zeros(labels, 40), "score.bias": torch.zeros(labels)}
    edit_tensors(folder / "model.safetensors", head)
    with pytest.raises(CheckpointError, match=f"has {labels} labels; a reward model of this family has 2"):
        load(folder)


@pytest.mark.parametrize("labels", [1, 3])
def test_a_math_prm_with_another_number_of_labels_is_refused(labels: int, copy_of: Callable[[str], Path]):
    folder = copy_of("math-prm")
    head = {"score.2.weight": torch.zeros(labels, 40), "score.2.bias": torch.zeros(labels)}
    edit_tensors(folder / "model.safetensors", head)
    with pytest.raises(CheckpointError, match=f"{labels} labels"):
        load(folder)


def test_a_classifier_head_without_bias_loads(copy_of: Callable[[str], Path]):
    folder = copy_of("classifier")
    edit_tensors(folder / "model.safetensors", {"score.bias": None})
    hidden, weight = torch.randn(3, 40), load_file(folder / "model.safetensors")["score.weight"]
    torch.testing.assert_close(load(folder).model.head(hidden), torch.softmax(hidden @ weight.T, dim=-1)[:, 1:])


def test_a_tensor_that_nothing_uses_is_an_error(copy_of: Callable[[str], Path]):
    folder = copy_of("math-prm")
    edit_tensors(folder / "model.safetensors", {"v_head.weight": torch.zeros(4)})
    with pytest.raises(CheckpointError, match=r"does not use: v_head\.weight"):
        load(folder)


def test_a_math_prm_whose_tokenizer_lacks_the_tag_is_refused(copy_of: Callable[[str], Path]):
    folder = copy_of("math-prm")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<extra_0>", "<extra_9>"))
    with pytest.raises(CheckpointError, match="no token <extra_0>"):
        load(folder)


def test_a_generator_given_as_verifier_is_refused_in_one_short_message_with_the_flags(
    tiny_checkpoints: dict[str, Path],
):
    folder = tiny_checkpoints["qwen2-tied"]
    with pytest.raises(
        CheckpointError, match=r"Qwen2ForCausalLM.* eurus-prm, thinkprm, yes-no, .*--generator.*--verifier-family"
    ) as error:
        load(folder)
    assert len(str(error.value).replace(str(folder), "")) < 290


def test_a_verifiers_class_that_nobody_knows_is_refused_with_those_that_are(copy_of: Callable[[str], Path]):
    folder = copy_of("math-prm")
    edit_json(folder / "config.json", {"architectures": ["Qwen2ForQuestionAnswering"]})
    with pytest.raises(
        CheckpointError, match=r"by their class are Qwen2ForProcessRewardModel, .*universal-prm"
    ) as error:
        load(folder)
    assert "ForCausalLM" not in str(error.value)


def test_a_verifier_given_as_generator_is_refused_in_one_short_message_with_the_flags(
    tiny_checkpoints: dict[str, Path],
):
    folder = tiny_checkpoints["math-prm"]
    with pytest.raises(
        CheckpointError,
        match=r"ProcessRewardModel, not a generator; give a .*ForCausalLM model to --generator.*--ver",
    ) as error:
        load_generator(Checkpoint(folder), torch.float32, "cpu")
    assert len(str(error.value).replace(str(folder), "")) < 260


@pytest.mark.parametrize("wrong", [{"prompt": "poem"}, {"score": "p1-p0"}])
def test_unknown_settings_of_a_classifier_are_refused(wrong: dict[str, Any], copy_of: Callable[[str], Path]):
    folder = copy_of("classifier")
    edit_json(folder / "config.json", {"prm": wrong})
    with pytest.raises(CheckpointError, match="has prompt, raw or chat"):
        load(folder)


@pytest.mark.parametrize("name", ["classifier", "chat-classifier", "math-prm"])
def test_scores_are_probabilities(name: str, tiny_checkpoints: dict[str, Path]):
    values = load(tiny_checkpoints[name]).model.head(10 * torch.randn(50, 40))
    assert values.shape == (50, 1)
    assert ((values >= 0) & (values <= 1)).all()
    assert values.max() - values.min() > 0.5


def test_a_verifiers_head_has_the_same_bits_for_a_row_alone_and_in_company(tiny_checkpoints: dict[str, Path]):
    for name in ("classifier", "math-prm"):
        head, hidden = load(tiny_checkpoints[name]).model.head, torch.randn(9, 40)
        together = head(hidden)
        assert all(torch.equal(head(hidden[i : i + 1])[0], together[i]) for i in range(9))


def test_a_raw_prompt_is_the_problem_after_the_tokenizers_bos_token(copy_of: Callable[[str], Path]):
    folder = copy_of("classifier")
    tokenizer = hf_tokenizer(folder)
    problem = "How many coins?"
    assert load(folder).prompt_ids(problem) == tokenizer.encode(problem, add_special_tokens=False)
    edit_json(folder / "tokenizer_config.json", {"bos_token": "<|endoftext|>"})
    assert load(folder).prompt_ids(problem) == [0, *tokenizer.encode(problem, add_special_tokens=False)]


def test_the_math_prms_prompt_is_the_model_cards(tiny_checkpoints: dict[str, Path]):
    folder = tiny_checkpoints["math-prm"]
    expected = (
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\nHow many coins?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = load(folder).prompt_ids("How many coins?")
    assert hf_tokenizer(folder).decode(ids) == expected


def test_a_classifiers_step_is_followed_by_its_separator_and_read_at_its_last_token(copy_of: Callable[[str], Path]):
    folder = copy_of("classifier")
    edit_json(folder / "config.json", {"prm": {"step_separator": "\n\n\n"}})
    family = load(folder)
    reading = family.read(StepPath("How many?", ("38+47=85\n\n",)))
    assert family.model.tokenizer.decode(list(reading.token_ids)) == "38+47=85\n\n\n"
    assert len(family.model.tokenizer.encode("\n\n\n")) > 1
    assert reading.score_positions == (len(reading.token_ids) - 1,)


def test_a_verifier_never_ends_a_generation(tiny_checkpoints: dict[str, Path]):
    assert load(tiny_checkpoints["classifier"]).model.eos_token_ids == ()
