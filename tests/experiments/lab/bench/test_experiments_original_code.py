"""search-and-learn's own searches get what they ask for: a generator, a tokenizer, scores of all steps."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from plain import plain_classifier_scores
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from espalier.engine.models.hub import locate
from espalier.experiments.lab.bench.baselines.int8_checkpoint import write_int8_checkpoint
from espalier.experiments.lab.bench.baselines.original_code import OriginalCode
from espalier.experiments.lab.bench.baselines.search_and_learn import OriginalSearchAndLearn
from espalier.search.request import AlgorithmName

FOLDERS = locate("demo-generator"), locate("demo-verifier")
PROBLEMS = [
    "A store has 47 pins in stock. (a) It makes 25 more. (b) It sends out 24. How many pins does it have now?",
    "A store has 47 pins in stock. (a) It makes 31 more. (b) It sends out 24. How many pins does it have now?",
]
TEXT = "(a) 47+25=72\n\n(b) 72-24=48\n\n\\boxed{48}"


@dataclass
class Config:
    approach: str
    n: int
    beam_width: int
    search_batch_size: int
    temperature: float
    max_tokens: int
    custom_chat_template: str
    system_prompt: str = "A long system prompt."


def one_sample_each(examples: dict[str, list[str]], config: Config, llm: Any, prm: Any) -> dict[str, Any]:
    """As search-and-learn's functions talk to both models."""
    tokenizer = llm.get_tokenizer()
    tokenizer.chat_template = config.custom_chat_template
    chats = [
        [{"role": "system", "content": config.system_prompt}, {"role": "user", "content": p}]
        for p in examples["problem"]
    ]
    prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    outputs = llm.generate([prompt for prompt in prompts for _ in range(config.n)], SimpleNamespace(), use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    completions = [texts[i * config.n : (i + 1) * config.n] for i in range(len(prompts))]
    return {"completions": completions, "scores": prm.score(examples["problem"], completions)}


class Llm:
    """Gives the same text whatever it is asked, and keeps the prompts."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def generate(self, prompts: list[str], sampling: Any, use_tqdm: bool) -> list[Any]:
        self.calls.append(prompts)
        return [SimpleNamespace(outputs=[SimpleNamespace(text=TEXT, token_ids=range(7))]) for _ in prompts]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Llm:
    sal, config, search = ModuleType("sal"), ModuleType("sal.config"), ModuleType("sal.search")
    vars(config)["Config"] = Config
    vars(search).update(dict.fromkeys(("beam_search", "dvts", "best_of_n"), one_sample_each))
    vars(sal)["search"] = search
    for module in (sal, config, search):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return Llm()


@torch.inference_mode()
def classify(rows: list[list[int]]) -> list[torch.Tensor]:
    model = AutoModelForTokenClassification.from_pretrained(FOLDERS[1], dtype=torch.float32).eval()
    return [model(torch.tensor([row])).logits[0] for row in rows]


def test_it_scores_every_step_and_counts_tokens_of_both_models(llm):
    found = OriginalCode(llm, classify, list(map(str, FOLDERS))).search("best_of_n", PROBLEMS, 2, 1)
    assert found["generated_tokens"] == 4 * 7
    for problem, solution in zip(PROBLEMS, found["solutions"], strict=True):
        assert solution["texts"] == [TEXT, TEXT]
        expected = plain_classifier_scores(FOLDERS[1], problem, TEXT.split("\n\n"), "\n\n", chat=True)
        assert solution["scores"] == pytest.approx([expected[-1]] * 2, abs=1e-5)
    assert found["verifier_tokens"] > 4 * 7
    assert llm.calls == [[f"<|im_start|>user\n{p}<|im_end|>\n<|im_start|>assistant\n" for p in PROBLEMS for _ in "ab"]]


def test_beam_search_takes_one_problem_at_a_time_and_the_others_a_batch(llm):
    code = OriginalCode(llm, lambda rows: [torch.zeros(len(row), 2) for row in rows], list(map(str, FOLDERS)))
    for approach, calls in (("beam_search", 2), ("dvts", 1), ("best_of_n", 1)):
        llm.calls.clear()
        code.search(approach, PROBLEMS, 1, 1)
        assert len(llm.calls) == calls


def test_a_text_without_steps_has_a_score(llm, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TEXT", "")
    code = OriginalCode(llm, lambda rows: [torch.zeros(len(row), 2) for row in rows], list(map(str, FOLDERS)))
    assert code.search("beam_search", PROBLEMS[:1], 2, 1)["solutions"] == [{"texts": ["", ""], "scores": [0.5, 0.5]}]


def test_its_solutions_are_voted_on_by_the_weights_of_their_scores():
    asked = []

    def original_search(*arguments: Any) -> dict[str, Any]:
        asked.append(arguments)
        texts = ["\\boxed{1}", "\\boxed{2}", "\\boxed{2}", "nothing"]
        solutions = [{"texts": texts, "scores": [0.5, 0.3, 0.3, 0.9]}]
        return {"solutions": solutions, "generated_tokens": 5, "verifier_tokens": 8}

    peer = OriginalSearchAndLearn(SimpleNamespace(original_search=original_search))  # pyright: ignore[reportArgumentType]
    assert peer.solve_all(PROBLEMS[:1], AlgorithmName.BEST_OF_N, 16, 4) == ["2"]
    assert asked == [("best_of_n", PROBLEMS[:1], 16, 4)]
    assert (peer.generated_tokens, peer.verifier_tokens) == (5, 8)


def test_an_int8_checkpoint_holds_the_weights_rounded_with_a_scale_for_each_output(tmp_path: Path):
    write_int8_checkpoint(FOLDERS[0], tmp_path / "int8")
    given, found = load_file(FOLDERS[0] / "model.safetensors"), load_file(tmp_path / "int8" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    assert found[name].dtype == torch.int8
    step = found[f"{name}_scale"]
    assert step.shape == (len(given[name]), 1)
    assert ((found[name] * step - given[name].float()).abs() <= step / 2 + 1e-6).all()
    assert torch.equal(found["model.embed_tokens.weight"], given["model.embed_tokens.weight"])
    config = json.loads((tmp_path / "int8" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (tmp_path / "int8" / "tokenizer.json").read_bytes() == (FOLDERS[0] / "tokenizer.json").read_bytes()
