"""A plain beam search over steps, for the gates only: any scorer, no engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import Qwen2ForCausalLM

from espalier.experiments.demo.batches import RowMaker
from espalier.experiments.demo.problems import MAX_OPERATIONS
from espalier.experiments.demo.sampling import sample
from espalier.experiments.demo.tokenizer import chat_prompt

Scorer = Callable[[Sequence[tuple[int, Sequence[str]]]], list[float]]
"""From (problem's index, steps so far) to the score of each one's last step."""


@dataclass(frozen=True, slots=True)
class Path:
    """One path of a problem's beam."""

    problem: int
    steps: tuple[str, ...] = ()
    score: float = 0.0
    finished: bool = False


def beam_search(
    model: Qwen2ForCausalLM,
    maker: RowMaker,
    problems: Sequence[str],
    score: Scorer,
    *,
    beam_width: int = 4,
    expansion: int = 4,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[list[Path]]:
    """Returns each problem's final beam, best first, by the score of the last step.

    Each round every unfinished path samples `expansion` steps (the first round starts from `beam_width` empty paths),
    the candidates are scored, and the best `beam_width` of them and of the finished paths stay.
    """
    beams = [[Path(index)] * beam_width for index in range(len(problems))]
    for depth in range(MAX_OPERATIONS + 2):
        parents = [path for beam in beams for path in beam if not path.finished for _ in range(expansion)]
        if not parents:
            break
        prompts = []
        for path in parents:
            steps = [token for step in path.steps for token in [*maker.encode(step), maker.delimiter]]
            prompts.append([*maker.encode(chat_prompt(problems[path.problem])), *steps])
        stops = frozenset({maker.end, maker.delimiter})
        drawn = sample(
            model, prompts, stops=stops, temperature=temperature, max_new_tokens=40, seed=seed * 1009 + depth
        )
        steps = [(*path.steps, maker.tokenizer.decode(ids[:-1])) for path, ids in zip(parents, drawn, strict=True)]
        scores = score([(path.problem, texts) for path, texts in zip(parents, steps, strict=True)])
        kept: list[list[Path]] = [[path for path in beam if path.finished] for beam in beams]
        for path, texts, value, ids in zip(parents, steps, scores, drawn, strict=True):
            kept[path.problem].append(Path(path.problem, texts, value, ids[-1] == maker.end))
        beams = [sorted(paths, key=lambda path: -path.score)[:beam_width] for paths in kept]
    return beams
