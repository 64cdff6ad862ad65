"""A beam search that the oracle prunes: how far search could come with a verifier that is always right."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import Qwen2ForCausalLM

from espalier.experiments.demo.batches import RowMaker
from espalier.experiments.demo.oracle import label_steps
from espalier.experiments.demo.problems import MAX_OPERATIONS, Problem
from espalier.experiments.demo.sampling import sample
from espalier.experiments.demo.tokenizer import chat_prompt


@dataclass(frozen=True, slots=True)
class BeamPath:
    """One path of a problem's beam; `right` if all of its steps are."""

    problem: int
    steps: tuple[str, ...] = ()
    right: bool = True
    finished: bool = False


def beam_search(
    model: Qwen2ForCausalLM,
    maker: RowMaker,
    problems: Sequence[Problem],
    *,
    beam_width: int = 4,
    expansion: int = 4,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[list[BeamPath]]:
    """Returns each problem's final beam, right paths first.

    Each round every unfinished path samples `expansion` steps (the first round starts from `beam_width` empty paths),
    and the right ones among the candidates and the finished paths stay, filled up with wrong ones to `beam_width`.
    """
    beams = [[BeamPath(index)] * beam_width for index in range(len(problems))]
    stops = frozenset({maker.end, maker.delimiter})
    for depth in range(MAX_OPERATIONS + 2):
        parents = [path for beam in beams for path in beam if not path.finished for _ in range(expansion)]
        if not parents:
            break
        prompts = []
        for path in parents:
            steps = [token for step in path.steps for token in [*maker.encode(step), maker.delimiter]]
            prompts.append([*maker.encode(chat_prompt(problems[path.problem].text)), *steps])
        drawn = sample(
            model, prompts, stops=stops, temperature=temperature, max_new_tokens=40, seed=seed * 1009 + depth
        )
        kept: list[list[BeamPath]] = [[path for path in beam if path.finished] for beam in beams]
        for path, ids in zip(parents, drawn, strict=True):
            problem = problems[path.problem]
            steps = (*path.steps, maker.tokenizer.decode(ids[:-1]))
            right = label_steps(problem.start, problem.operands, steps)[-1]
            kept[path.problem].append(BeamPath(path.problem, steps, right, ids[-1] == maker.end))
        beams = [sorted(paths, key=lambda path: not path.right)[:beam_width] for paths in kept]
    return beams
