"""Decode tokens/s with drafts and without, in pairs of turns, whose tokens are compared."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Annotated, Any

import typer

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.models.options import Quantization
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Generate, Generated, Sampling, stream_key
from espalier.experiments.cli.options import parse_int_list, parse_list
from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.search.run.generator import Generator
from espalier.search.run.load import load_generator_alone
from espalier.search.run.settings import RuntimeSettings

PROBLEMS = (
    "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many did she sell altogether?",
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?",
    "What is the sum of all positive integers n below 40 for which n squared ends in 6?",
    "A train goes 60 km/h for 2 hours and then 80 km/h for 90 minutes. How far does it go, and at what mean speed?",
)


@dataclass(slots=True)
class _Turn:
    tokens: list[list[int]]
    seconds: float
    cpu_seconds: float
    steps: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """Tokens/s; the first of each sequence comes with the prompt."""
        return (sum(map(len, self.tokens)) - len(self.tokens)) / self.seconds


def run(
    runtime: RuntimeSettings,
    new_tokens: int,
    repeats: int,
    batches: Sequence[int] = (1,),
    temperatures: Sequence[float] = (0.0, 0.7),
    show: Show = nothing_shown,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Measure each batch size and temperature.

    Args:
        runtime: the models, and what drafts.
        new_tokens: tokens to decode for each sequence at most.
        repeats: counted pairs of turns, of other streams each; one more comes first, in which drafting is learnt.
        batches: sequences decoded at once, each of a problem of its own or with a stream of its own.
        temperatures: of their draws.
        show: gets the figures that there are so far.

    Returns:
        Rows with medians, and ratios `tokens/s@B/T` and `CPU@B/T` of what there is with drafts over without: medians of
        pairs.
    """
    drafting, generator = load_generator_alone(runtime)
    settings = EngineSettings(drafting.settings.kv_memory_bytes)
    plain = Engine({GENERATOR: drafting.model(GENERATOR)}, settings)
    rows, ratios = [], {}
    for batch in batches:
        for temperature in temperatures:
            pairs: list[tuple[_Turn, _Turn]] = []
            for repeat in range(repeats + 1):
                engines = [plain, drafting] if repeat % 2 else [drafting, plain]
                turns = {id(each): _turn(each, generator, batch, temperature, new_tokens, repeat) for each in engines}
                pairs.append((turns[id(plain)], turns[id(drafting)]))
            without, with_drafts = zip(*pairs[1:], strict=True)
            drafted = sum(turn.drafted for turn in with_drafts)
            rows.append(
                {
                    "batch": batch,
                    "temperature": temperature,
                    "tokens/s": statistics.median(turn.rate for turn in without),
                    "with drafts": statistics.median(turn.rate for turn in with_drafts),
                    "tokens a step": sum(sum(map(len, t.tokens)) - batch for t in with_drafts)
                    / (batch * sum(t.steps for t in with_drafts)),
                    "drafted": drafted,
                    "accepted": sum(turn.accepted for turn in with_drafts) / max(1, drafted),
                    "same tokens": all(one.tokens == other.tokens for one, other in pairs),
                }
            )
            rates = [other.rate / one.rate for one, other in pairs[1:]]
            ratios[f"tokens/s@{batch}/T{temperature:g}"] = statistics.median(rates)
            cpu = [one.cpu_seconds / other.cpu_seconds for one, other in pairs[1:]]
            ratios[f"CPU@{batch}/T{temperature:g}"] = statistics.median(cpu)
            show(rows, ratios)
    plain.close()
    drafting.close()
    return rows, ratios


def _turn(engine: Engine, generator: Generator, batch: int, temperature: float, new_tokens: int, repeat: int) -> _Turn:
    """Decode `batch` sequences; prompts are computed before the time begins."""
    sequences = []
    for i, problem in enumerate(islice(cycle(PROBLEMS), repeat, repeat + batch)):
        sequence = engine.open(GENERATOR, generator.prompt_ids(problem), owner=i)
        sampling = Sampling(temperature, key=stream_key(repeat, problem, (i,)))
        engine.submit(Generate(i, sequence, (sampling,), new_tokens, delimiter="", in_place=True, tag=i))
        sequences.append(sequence)
    while engine.schedulers[GENERATOR].waiting_tokens():
        engine.step()
    before, done = engine.stats()[GENERATOR], list[Generated]()
    start, cpu_start = time.perf_counter(), time.process_time()
    while engine.busy:
        done += [each for each in engine.step() if isinstance(each, Generated)]
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    after = engine.stats()[GENERATOR]
    for sequence in sequences:
        engine.release(sequence)
    tokens = [each.token_ids for each in sorted(done, key=lambda each: each.work.tag)]
    drafted, accepted = (getattr(after, name) - getattr(before, name) for name in ("drafted_tokens", "accepted_tokens"))
    return _Turn(tokens, seconds, cpu_seconds, after.steps - before.steps, drafted, accepted)


def command(
    generator: Annotated[str, typer.Option(help="Checkpoint to decode with.")] = "demo-generator",
    draft: Annotated[str, typer.Option(help="What drafts: tree, or a smaller checkpoint.")] = "tree",
    draft_tokens: Annotated[int, typer.Option(min=1, max=32, help="Maximum draft.")] = 8,
    quantization: Annotated[Quantization, typer.Option(help="Of the weights of both.")] = Quantization.NONE,
    temperatures: Annotated[str, typer.Option(help="Temperatures of the draws, like 0,0.7.")] = "0,0.7",
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1",
    new_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens to decode for each sequence.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Counted pairs of turns.")] = 3,
    json_path: JsonPath = None,
) -> None:
    """Decode tokens/s with drafts and without, on real prompts; the tokens are compared."""
    runtime = RuntimeSettings(
        generator,
        "",
        generator_quantization=quantization,
        draft=draft,
        draft_tokens=draft_tokens,
        draft_quantization=quantization,
    )
    chosen = [float(each) for each in parse_list(temperatures, "--temperatures")]
    report = Report(f"decoding with drafts of up to {draft_tokens} tokens, {quantization} weights", json_path)
    report.finish(*run(runtime, new_tokens, repeats, parse_int_list(batches, "--batches"), chosen, report.show))
