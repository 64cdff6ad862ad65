"""Each family's recipe in a few lines over transformers: the whole text of a path, fed at once."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from family_models import JUDGED, tensors
from plain import hf_tokenizer, plain_classifier_scores, plain_math_prm_scores, token_classifier
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2Model,
)


def _encode(folder: Path, text: str) -> list[int]:
    return hf_tokenizer(folder).encode(text, add_special_tokens=False)


def _chat(folder: Path, *turns: str, generation: bool = True, system: str | None = None) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    start = [] if system is None else [{"role": "system", "content": system}]
    how = {"tokenize": False, "add_generation_prompt": generation, "date_string": "26 Jul 2024"}
    return str(hf_tokenizer(folder).apply_chat_template(start + messages, **how))


@cache
def _qwen_trunk(folder: Path) -> Qwen2Model:
    model = Qwen2Model(Qwen2Config.from_pretrained(folder, attn_implementation="eager")).eval()
    weights = {n.removeprefix("model."): w for n, w in tensors(folder).items() if n.startswith("model.")}
    model.load_state_dict(weights)
    return model


@cache
def _llama(folder: Path, kind: type = LlamaForCausalLM) -> torch.nn.Module:
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _bare(step: str) -> str:
    """Without newlines around it and without a label of its own."""
    return re.sub(r"^[# ]*Step \d+:\s*", "", step.strip("\n"))


def reasonflux(folder: Path, problem: str, steps: list[str]) -> list[float]:
    text = _chat(folder, problem) + "".join(step.strip("\n") + "<extra_0>" for step in steps)
    ids = _encode(folder, text)
    tag = hf_tokenizer(folder).convert_tokens_to_ids("<extra_0>")
    score_positions = [i for i, token in enumerate(ids) if token == tag]
    hidden, w = _qwen_trunk(folder)(torch.tensor([ids])).last_hidden_state[0, score_positions], tensors(folder)
    inner = torch.relu(hidden @ w["score.0.weight"].T + w["score.0.bias"])
    return torch.softmax(inner @ w["score.2.weight"].T + w["score.2.bias"], dim=-1)[:, 1].tolist()


def skywork(folder: Path, problem: str, steps: list[str]) -> list[float]:
    """The authors' `prepare_input` on the whole answer, which reads after each line, blank ones too.

    The steps' scores are the least of their lines' that are not blank.
    """
    (newline,) = _encode(folder, "\n")
    ids, score_positions = _encode(folder, f"<|endoftext|>{problem}\n"), []
    bare = [step.strip("\n") for step in steps]
    for line in "\n\n".join(bare).split("\n"):
        ids += [*(_encode(folder, line) if line else []), newline]
        score_positions.append(len(ids) - 1)
    hidden, w = _qwen_trunk(folder)(torch.tensor([ids])).last_hidden_state[0, score_positions], tensors(folder)
    rewards = iter(torch.sigmoid(hidden @ w["v_head.summary.weight"].T + w["v_head.summary.bias"])[:, 0].tolist())
    scores = []
    for step in bare:
        lines = [(line, next(rewards)) for line in step.split("\n")]
        scores.append(min(reward for line, reward in lines if line.strip()))
        next(rewards, None)  # the blank line between two steps
    return scores


def yes_no(folder: Path, problem: str, steps: list[str]) -> list[float]:
    """One chat of three turns for each step, rendered and read whole."""
    yes, no = (hf_tokenizer(folder).convert_tokens_to_ids(token) for token in ("Yes", "No"))
    question = "Is this solution right so far, its last step included? Answer with one word: Yes or No."
    model, scores = _causal(folder), []
    for end in range(1, len(steps) + 1):
        # A template may strip a turn, and the path keeps the blank line after a step.
        chat = _chat(folder, problem, "ANSWER", question)
        answer = "".join(step.strip("\n") + "\n\n" for step in steps[:end])
        logits = model(torch.tensor([_encode(folder, chat.replace("ANSWER", answer))])).logits[0, -1]
        scores.append(float(torch.softmax(logits[[yes, no]], dim=-1)[0]))
    return scores


def judge(folder: Path, problem: str, steps: list[str]) -> list[float]:
    """One chat of three turns for each step and question, read whole; the mean of expectations over each scale."""
    model, scores = _causal(folder), []
    letters, digits = (hf_tokenizer(folder).convert_tokens_to_ids(list(scale)) for scale in ("ABCDE", "0123456789"))
    for end in range(1, len(steps) + 1):
        expected = []
        for criterion in JUDGED["criteria"]:
            asked = (
                (
                    f"Judge the solution so far, its last step included, by this: {criterion} Answer with one letter "
                    "from A to E, where A means not at all and E means entirely.",
                    letters,
                ),
                (
                    f"{criterion} How far is that true of the solution so far? 0 is completely false, 9 is completely "
                    "true. Answer with one digit from 0 to 9.",
                    digits,
                ),
                (
                    f"Grade your confidence in this statement about the solution so far: {criterion} A is none, E is "
                    "full. Answer with one letter from A to E.",
                    letters,
                ),
            )
            for question, scale in asked:
                answer = "".join(step.strip("\n") + "\n\n" for step in steps[:end])
                chat = _chat(folder, problem, "ANSWER", question).replace("ANSWER", answer)
                logits = model(torch.tensor([_encode(folder, chat)])).logits[0, -1, scale]
                expected.append(torch.softmax(logits, dim=-1) @ torch.linspace(0.0, 1.0, len(scale)))
        scores.append(float(sum(expected) / len(expected)))
    return scores


def likelihood(folder: Path, problem: str, steps: list[str]) -> list[float]:
    """The model's own prompt and the steps as they are, read whole: exp of mean log-probabilities up to each step."""
    prompt = _encode(folder, _chat(folder, problem, system="Use steps."))
    parts = [_encode(folder, "\n\n" * (i > 0 and steps[i - 1][-1] != "\n") + step) for i, step in enumerate(steps)]
    answer = [i for part in parts for i in part]
    logits = _causal(folder)(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    found = torch.log_softmax(logits.double(), dim=-1).gather(1, torch.tensor(answer)[:, None])[:, 0].cumsum(0)
    ends = torch.tensor([len(part) for part in parts]).cumsum(0)
    return (found[ends - 1] / ends).exp().tolist()


def rlhflow(folder: Path, problem: str, steps: list[str]) -> list[float]:
    good, bad = (hf_tokenizer(folder).convert_tokens_to_ids(token) for token in "+-")
    model, scores = _llama(folder), []
    for end in range(1, len(steps) + 1):
        turns = [f"{problem} {steps[0].strip()}"]
        for step in steps[1:end]:
            turns += ["+", step.strip()]
        logits = model(torch.tensor([_encode(folder, _chat(folder, *turns, "+", generation=False))])).logits[0]
        scores.append(float(torch.softmax(logits[-3, [good, bad]], dim=-1)[0]))  # before "+" and the turn's end
    return scores


def versaprm(folder: Path, problem: str, steps: list[str]) -> list[float]:
    """The published usage: one text, read wherever the tokenizer gives the separator's token."""
    tokenizer = hf_tokenizer(folder)
    text = problem + " \n\n" + " \n\n\n\n".join(step.strip() for step in steps) + " \n\n\n\n"
    ids = [tokenizer.bos_token_id, *_encode(folder, text)]
    bad, good, tag = (tokenizer.convert_tokens_to_ids(token) for token in ("-", "+", "ĠĊĊĊĊ"))
    logits = _llama(folder)(torch.tensor([ids])).logits[0][:, [bad, good]]
    return torch.softmax(logits, dim=-1)[torch.tensor(ids) == tag, 1].tolist()


def math_shepherd(folder: Path, problem: str, steps: list[str]) -> list[float]:
    tokenizer = hf_tokenizer(folder)
    good, bad, tag = (tokenizer.convert_tokens_to_ids(token) for token in ("▁+", "▁-", "▁ки"))
    marked = [f"Step {i}: {_bare(step).strip()} ки" for i, step in enumerate(steps, start=1)]
    ids = [tokenizer.bos_token_id, *_encode(folder, f"{problem} " + "\n".join(marked))]
    logits = _llama(folder)(torch.tensor([ids])).logits[0]
    own = [step.count(" ки") for step in marked]  # a tag that a step holds itself comes before the one that is read
    tags, at = [i for i, token in enumerate(ids) if token == tag], []
    assert len(tags) == sum(own)
    for count in own:
        at.append(tags[count - 1])
        tags = tags[count:]
    return torch.softmax(logits[at][:, [good, bad]], dim=-1)[:, 0].tolist()


def pure(folder: Path, problem: str, steps: list[str]) -> list[float]:
    """The authors' evaluation: p1 - p0 at the newline after each step, and here half of that and a half."""
    (separator,) = _encode(folder, "\n")
    ids, score_ids = _encode(folder, problem), []
    for step in steps:  # a solution split at its blank lines, each part without the space after it
        ids += [*_encode(folder, step.strip("\n").rstrip()), separator]
        score_ids.append(len(ids) - 1)
    wrong, right = torch.softmax(token_classifier(folder)(torch.tensor([ids])).logits[0, score_ids], dim=-1).T
    return ((1 + (right - wrong)) / 2).tolist()


def universal(folder: Path, problem: str, steps: list[str]) -> list[float]:
    user = f"{problem}\n\n###\n\nThe reference answer is: There is no reference answer for this question."
    prompt = _encode(folder, _chat(folder, user, system="You are a helpful assistant."))
    model, weight, scores = _qwen_trunk(folder), tensors(folder)["score.weight"], []
    for end in range(1, len(steps) + 1):
        answer = "\n\n".join(step.strip("\n") for step in steps[:end]) + "\n\n"
        ids = [*prompt, *_encode(folder, answer), hf_tokenizer(folder).eos_token_id]
        scores.append(float(torch.sigmoid(model(torch.tensor([ids])).last_hidden_state[0, -1] @ weight[0])))
    return scores


def value_guided(folder: Path, problem: str, steps: list[str]) -> list[float]:
    """The authors' roll-in and classifier; the value after a block is at its last token."""
    ids = _encode(
        folder,
        f"<｜begin▁of▁sentence｜><｜User｜>{problem} Please think step-by-step and put your final answer within "
        "\\boxed{}.<｜Assistant｜><think>\n",
    )
    ends = []
    for step in steps:
        ids += _encode(folder, step)
        ends.append(len(ids) - 1)
    hidden, w = _qwen_trunk(folder)(torch.tensor([ids])).last_hidden_state[0, ends], tensors(folder)
    logits = torch.relu(hidden @ w["score.0.weight"].T) @ w["score.2.weight"].T
    return torch.softmax(logits, dim=-1)[:, 1].tolist()


def thinkprm_prompt(folder: Path, problem: str, steps: list[str]) -> str:
    """The authors' `format_verification_cot_for_thinkprm`, after the step labels of their `process_example`."""
    bare = [re.sub(r"Step \d+:", "", step.replace("## Step", "Step")).strip() for step in steps]
    solution = "\n".join(f"Step {i + 1}: {step}" for i, step in enumerate(bare))
    content = (
        "You are given a math problem and a proposed step-by-step solution:\n\n[Math Problem]\n\n" + problem + "\n\n"
        "[Solution]\n\n" + solution + "\n\nReview and critique each step in the proposed solution to determine whether "
        "each step is correct. If the solution is incomplete, only verify the provided steps."
    )
    return _chat(folder, content) + "\nLet's verify step by step:"


@torch.inference_mode()
def thinkprm(folder: Path, problem: str, steps: list[str], rationales: list[list[int]]) -> float:
    """The mean over rationales, already cut, of the authors' verdict after them.

    The server that they ask appends `yes` and `no` to the text and averages the log-probabilities of what that adds to
    the question; they take the softmax of the two.
    """
    model, prompt = _causal(folder), _encode(folder, thinkprm_prompt(folder, problem, steps))
    question = _encode(folder, "\nIs the solution correct?")
    scores = []
    for rationale in rationales:
        choices = []
        for label in ("yes", "no"):
            asked = _encode(folder, f"\nIs the solution correct? {label}")
            assert asked[: len(question)] == question
            ids = torch.tensor([*prompt, *rationale, *asked])
            logs = torch.log_softmax(model(ids[None]).logits[0, :-1], dim=-1).gather(1, ids[1:, None])[:, 0]
            choices.append(logs[len(question) - len(asked) :].mean())
        scores.append(torch.softmax(torch.stack(choices), dim=0)[0].item())
    return sum(scores) / len(scores)


def thinkprm_greedy(folder: Path, problem: str, steps: list[str], most: int, ends: set[int]) -> list[int]:
    """The most likely rationale, the whole text fed anew for each token; up to `most` tokens or the first of `ends`."""
    prompt, rationale = _encode(folder, thinkprm_prompt(folder, problem, steps)), []
    with torch.inference_mode():
        while len(rationale) < most and not ends.intersection(rationale):
            rationale.append(int(_causal(folder)(torch.tensor([[*prompt, *rationale]])).logits[0, -1].argmax()))
    return rationale


@cache
def _causal(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def eurus(folder: Path, problem: str, steps: list[str], reference: Path) -> list[float]:
    prompt = _encode(folder, _chat(folder, problem))
    marked = [f"Step {i}: {_bare(step)}\n\n" for i, step in enumerate(steps, start=1)]
    parts = [_encode(folder, step) for step in marked]
    assert _encode(folder, "".join(marked)) == [i for part in parts for i in part]
    ids = torch.tensor([prompt + [i for part in parts for i in part]])
    logs = []
    for part in (folder, reference):
        logs.append(torch.log_softmax(_causal(part)(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0])
    counted = torch.arange(1, ids.shape[1]) >= len(prompt) - 1  # their label mask begins with the header's last token
    rewards = (0.001 * (logs[0] - logs[1]).double() * counted).cumsum(0)
    ends = (
        len(prompt) + torch.tensor([len(part) for part in parts]).cumsum(0) - 2
    )  # of what is asked about the token after
    return torch.sigmoid(rewards[ends]).tolist()


def outcome(folder: Path, problem: str, steps: list[str]) -> float:
    """One score for the whole answer."""
    answer = "\n\n".join(step.strip("\n") for step in steps)
    ids = _encode(folder, _chat(folder, problem, answer, generation=False))
    model = _llama(folder, LlamaForSequenceClassification)
    return float(torch.sigmoid(model(torch.tensor([ids])).logits[0, 0]))


def plain_scores(name: str, folders: dict[str, Path], problem: str, steps: list[str]) -> list[float]:
    """Scores of all steps of a path by the family's own recipe."""
    recipes: dict[str, Callable[..., list[float]]] = {
        "qwen2.5-math-prm": plain_math_prm_scores,
        "reasonflux-prm": reasonflux,
        "skywork-o1-open-prm": skywork,
        "yes-no": yes_no,
        "likelihood": likelihood,
        "judge": judge,
        "rlhflow": rlhflow,
        "versaprm": versaprm,
        "math-shepherd": math_shepherd,
        "token-classifier": lambda folder, *path: plain_classifier_scores(folder, path[0], path[1], "\n", False),
        "chat-classifier": lambda folder, *path: plain_classifier_scores(folder, path[0], path[1], "\n\n", True),
        "pure": pure,
        "value-guided": value_guided,
        "universal-prm": universal,
        "eurus-prm": lambda folder, *path: eurus(folder, path[0], path[1], folders["eurus-reference"]),
    }
    with torch.inference_mode():
        return recipes[name](folders[name], problem, steps)
