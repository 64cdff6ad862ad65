"""The peers that `bench search` times beside Espalier: search-and-learn, rewritten plainly and as it is."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from espalier.engine.errors import EspalierError
from espalier.engine.models.hub import locate
from espalier.experiments.lab.bench.baselines.int8_checkpoint import write_int8_checkpoint
from espalier.experiments.lab.bench.baselines.search_and_learn import OriginalSearchAndLearn, Peer, SearchAndLearn
from espalier.experiments.lab.bench.baselines.vllm_process import VllmError, VllmProcess, VllmSettings, optional_vllm

GENERATOR, VERIFIER = "demo-generator", "demo-verifier"
TITLES = {
    "transformers": "search-and-learn {}, float32, rewritten on transformers",
    "vllm": "search-and-learn {}, float32, rewritten on vLLM",
    "original": "search-and-learn {}, float32, its own code on vLLM",
    "original-int8": "search-and-learn {}, int8, its own code on vLLM",
}
"""Description of each peer, around the algorithm's name."""
_INT8_DTYPE = "bfloat16"
"""Of activations beside int8 weights: with it, vLLM multiplies bytes on every processor; with float32 it may not."""


@contextmanager
def running_peers(
    python: str | None, search_and_learn: Path | None, only: Sequence[str], candidates: int
) -> Iterator[tuple[dict[str, Peer], list[str]]]:
    """Run the peers for the duration of the context.

    Args:
        python: interpreter with vLLM; see `optional_vllm`.
        search_and_learn: folder with search-and-learn's package `sal`; its own code takes part where there is vLLM.
        only: which of `TITLES` take part; by default all that can.
        candidates: samples of one problem at a time.

    Yields:
        The peers by the names of `TITLES`, the strongest baseline last; and remarks: vLLM's version, and why a peer is
        missing.

    Raises:
        EspalierError: a peer of `only` cannot run, or search-and-learn's code is wanted without vLLM.
        VllmError: vLLM does not start.
    """
    generator, verifier = locate(GENERATOR), locate(VERIFIER)
    settings = VllmSettings(
        generator, verifier, max_sequences=max(candidates, 256), search_and_learn=search_and_learn
    )  # room for all candidates in one batch, at least vLLM's default
    peers: dict[str, Peer] = {}
    remarks: list[str] = []
    wanted = only or tuple(TITLES)
    if search_and_learn and not (search_and_learn / "sal").is_dir():
        raise EspalierError(f"--search-and-learn {search_and_learn}: it has no folder sal; name search-and-learn's src")
    with ExitStack() as stack:
        vllm = None
        if {"vllm", "original", "original-int8"} & {*wanted}:
            vllm = stack.enter_context(optional_vllm(python, settings))
        if vllm:
            remarks.append(vllm.description)
        elif search_and_learn:
            raise EspalierError("--search-and-learn needs vLLM to run on; name its interpreter with --vllm-python")
        if "transformers" in wanted:
            peers["transformers"] = SearchAndLearn(generator, verifier)
        if vllm and "vllm" in wanted:
            peers["vllm"] = SearchAndLearn(generator, verifier, vllm)
        if vllm and search_and_learn and "original-int8" in wanted:
            _start_int8(stack, vllm.python, settings, peers, remarks)
        if vllm and search_and_learn and "original" in wanted:
            peers["original"] = OriginalSearchAndLearn(vllm)
        if missing := {*only} - {*peers}:
            remedy = "--vllm-python, and for search-and-learn's own code --search-and-learn, name what it needs"
            raise EspalierError(f"--peers {min(missing)} cannot run{''.join(f' ({r})' for r in remarks[1:])}; {remedy}")
        yield peers, remarks


def _start_int8(
    stack: ExitStack, python: str, settings: VllmSettings, peers: dict[str, Peer], remarks: list[str]
) -> None:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    generator, verifier = folder / "generator", folder / "verifier"
    write_int8_checkpoint(locate(GENERATOR), generator)
    write_int8_checkpoint(locate(VERIFIER), verifier)
    quantised = replace(settings, generator=generator, verifier=verifier, dtype=_INT8_DTYPE)
    try:
        vllm = stack.enter_context(VllmProcess(python, quantised))
    except VllmError as error:
        remarks.append(f"without the int8 peer: {error}")
        return
    peers["original-int8"] = OriginalSearchAndLearn(vllm)
