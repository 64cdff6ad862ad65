"""Step scores of whole solutions, by the verifier: recomputed from scratch, for judging it."""

from collections.abc import Sequence

import torch
from transformers import Qwen2ForTokenClassification

from espalier.experiments.demo.batches import IGNORED, RowMaker, collate

Solution = tuple[str, Sequence[str]]
"""A problem's text and the steps of one solution."""


@torch.inference_mode()
def score_solutions(
    model: Qwen2ForTokenClassification, maker: RowMaker, solutions: Sequence[Solution], batch_rows: int = 64
) -> list[list[float]]:
    """Returns, for every solution, the probability that each step is right (all before it included).

    Equal solutions are scored once.
    """
    distinct = sorted({(problem, tuple(steps)) for problem, steps in solutions})
    rows = [maker.judged_steps(problem, steps, [True] * len(steps)) for problem, steps in distinct]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
    scores: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for first in range(0, len(order), batch_rows):
        chosen = order[first : first + batch_rows]
        batch = collate([rows[i] for i in chosen], maker.pad)
        ids, wanted = batch.ids.to(model.device), (batch.labels != IGNORED).to(model.device)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        right = torch.softmax(model.score(hidden[wanted]).float(), -1)[:, 1].tolist()
        for i in chosen:
            count = len(distinct[i][1])
            scores[distinct[i]], right = right[:count], right[count:]
    return [scores[problem, tuple(steps)] for problem, steps in solutions]
