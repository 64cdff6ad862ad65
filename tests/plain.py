"""What transformers says: plain implementations that feed whole texts, to compare the engine and the verifiers with."""

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Model,
)


@cache
def hf_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(
        folder
    )  # AutoTokenizer would rebuild Qwen2's own from the vocabulary


@cache
def _causal(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@torch.inference_mode()
def plain_logits(folder: Path, token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits `[tokens, vocabulary]` of one text."""
    return _causal(folder, dtype)(torch.tensor([token_ids])).logits[0]


def plain_greedy(folder: Path, token_ids: list[int], count: int) -> tuple[list[int], float]:
    """The most likely continuation and its log-probability, the whole text fed anew for each token."""
    text, total = list(token_ids), 0.0
    for _ in range(count):
        logits = plain_logits(folder, text)[-1]
        text.append(int(logits.argmax()))
        total += float(torch.log_softmax(logits, dim=-1)[text[-1]])
    return text[len(token_ids) :], total


@cache
def token_classifier(folder: Path) -> torch.nn.Module:
    kind = AutoModelForTokenClassification
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def plain_classifier_scores(folder: Path, problem: str, steps: list[str], separator: str, chat: bool) -> list[float]:
    """TRL's layout, all steps at once: probability of label 1 at each separator's last token."""
    tokenizer = hf_tokenizer(folder)
    prompt = problem
    if chat:
        messages = [{"role": "user", "content": problem}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids, score_positions = tokenizer.encode(prompt, add_special_tokens=False), []
    for step in steps:
        ids += tokenizer.encode(step.strip("\n"), add_special_tokens=False)
        ids += tokenizer.encode(separator, add_special_tokens=False)
        score_positions.append(len(ids) - 1)
    logits = token_classifier(folder)(torch.tensor([ids])).logits[0]
    return torch.softmax(logits, dim=-1)[score_positions, 1].tolist()


@cache
def _math_prm(folder: Path) -> tuple[Qwen2Model, dict[str, torch.Tensor]]:
    """The trunk, and all tensors."""
    weights = load_file(folder / "model.safetensors")
    model = Qwen2Model(Qwen2Config.from_pretrained(folder, attn_implementation="eager")).eval()
    model.load_state_dict({n.removeprefix("model."): w for n, w in weights.items() if n.startswith("model.")})
    return model, weights


@torch.inference_mode()
def plain_math_prm_scores(folder: Path, problem: str, steps: list[str]) -> list[float]:
    """The model card's recipe for Qwen2.5-Math-PRM on one text: softmax of the two-layer head at each `<extra_0>`."""
    model, weights = _math_prm(folder)
    tokenizer = hf_tokenizer(folder)
    system = "Please reason step by step, and put your final answer within \\boxed{}."
    prompt = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n"
    ids, score_positions = tokenizer.encode(prompt, add_special_tokens=False), []
    for step in steps:
        score_positions.append(len(ids) + len(step_ids := tokenizer.encode(step.strip("\n"), add_special_tokens=False)))
        ids += [*step_ids, tokenizer.convert_tokens_to_ids("<extra_0>")]
    hidden = model(torch.tensor([ids])).last_hidden_state[0, score_positions]
    inner = torch.relu(hidden @ weights["score.0.weight"].T + weights["score.0.bias"])
    return torch.softmax(inner @ weights["score.2.weight"].T + weights["score.2.bias"], dim=-1)[:, 1].tolist()
