"""Options of a search, which `solve`, `eval` and `sweep` share: a field of `SearchRequest` each."""

from typing import Annotated

import typer

from espalier.search.request import Aggregation, AlgorithmName, Vote

Algorithm = Annotated[
    AlgorithmName,
    typer.Option("--algorithm", "-a", help="Which search; README.md says what each does.", rich_help_panel="Search"),
]
BeamWidth = Annotated[
    int,
    typer.Option(
        "--beam-width",
        "-N",
        help="N: paths kept after each step, subtrees, particles, or independent paths. (search-and-learn: n is N·M.)",
        rich_help_panel="Search",
    ),
]
Expansion = Annotated[
    int,
    typer.Option(
        "--expansion",
        "-M",
        help="M: children each kept path samples; a step scores N·M. adaptive: paths at a time. (search-and-learn: "
        "beam_width.)",
        rich_help_panel="Search",
    ),
]
VoteOption = Annotated[
    Vote | None,
    typer.Option(
        "--vote",
        help="How complete answers elect one; default: majority for majority, adaptive and one path, else weighted.",
        rich_help_panel="Search",
        show_default=False,
    ),
]
AggregationOption = Annotated[
    Aggregation, typer.Option("--aggregation", help="Step scores to path score.", rich_help_panel="Search")
]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="0 is greedy; default: the checkpoint's own, whatever its do_sample says, else 0.8.",
        rich_help_panel="Search",
        show_default=False,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        help="Most likely tokens kept, 0 for all; default: the checkpoint's own.",
        rich_help_panel="Search",
        show_default=False,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Mass kept of those; default: the checkpoint's own, else 1.", rich_help_panel="Search", show_default=False
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Least share of the likeliest token's probability; default: the checkpoint's own, else 0.",
        rich_help_panel="Search",
        show_default=False,
    ),
]
MaxSteps = Annotated[int, typer.Option(help="Depth limit, in steps.", rich_help_panel="Search")]
MaxStepTokens = Annotated[int, typer.Option(help="Limit on one step's tokens.", rich_help_panel="Search")]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="Limit on one path's tokens; default: 2048 or the context.", rich_help_panel="Search", show_default=False
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of all sampling.", rich_help_panel="Search")]
GeneratorBudget = Annotated[
    int | None,
    typer.Option(
        help="Limit on the tokens sampled in the whole search; default: none.",
        rich_help_panel="Search",
        show_default=False,
    ),
]
VerifierBudget = Annotated[
    int | None,
    typer.Option(
        help="Limit on the verifier's tokens in the whole search; default: none.",
        rich_help_panel="Search",
        show_default=False,
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        help="Seconds after which a search ends with the best it has; default: none.",
        rich_help_panel="Search",
        show_default=False,
    ),
]
MergeDuplicates = Annotated[
    bool,
    typer.Option(
        "--merge-duplicates/--no-merge-duplicates",
        help="Compute equal samples of a step once and count them; without, each is decoded and scored by itself.",
        rich_help_panel="Search",
    ),
]
LookaheadSteps = Annotated[
    int | None,
    typer.Option(
        help="lookahead: greedy steps after which a child is scored; default: 1.",
        rich_help_panel="Search",
        show_default=False,
    ),
]
Simulations = Annotated[
    int | None,
    typer.Option(
        help="mcts: walks down the tree, most of which expand a leaf; default: 32.",
        rich_help_panel="Search",
        show_default=False,
    ),
]
Exploration = Annotated[
    float | None,
    typer.Option(
        help="mcts: weight of what was seen little; default: 1.25.", rich_help_panel="Search", show_default=False
    ),
]
RebaseTemperature = Annotated[
    float | None,
    typer.Option(
        help="rebase: temperature by which scores share out the samples; default: 0.1.",
        rich_help_panel="Search",
        show_default=False,
    ),
]
Iterations = Annotated[
    int | None,
    typer.Option(
        help="particle: runs of the filter, more than one for particle Gibbs; default: 1.",
        rich_help_panel="Search",
        show_default=False,
    ),
]
Confidence = Annotated[
    float | None,
    typer.Option(
        help="adaptive: stop when the majority's leader is first for good with this probability; default: 0.95.",
        rich_help_panel="Search",
        show_default=False,
    ),
]
