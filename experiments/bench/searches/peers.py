"""The peers that `bench search` times beside Espalier: search-and-learn, rewritten plainly and as it is."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from espalier.engine.errors import EspalierError
from espalier.engine.models.hub import locate
from espalier.experiments.bench.baselines.int8_checkpoint import write_int8_checkpoint
from espalier.experiments.bench.baselines.search_and_learn import OriginalSearchAndLearn, Peer, SearchAndLearn
from espalier.experiments.bench.baselines.vllm_process import VllmError, VllmProcess, VllmSettings, optional_vllm

GENERATOR, VERIFIER = "demo-generator", "demo-verifier"
TITLES = {
    "transformers": "search-and-learn {}, float32, rewritten on transformers",
    "vllm": "search-and-learn {}, float32, rewritten on vLLM",
    "original": "search-and-learn {}, float32, its own code on vLLM",
    "original-int8": "search-and-learn {}, int8, its own code on vLLM",
}
"""What each peer is, around the algorithm's name."""
_INT8_DTYPE = "bfloat16"
"""Of activations beside int8 weights: with it, vLLM multiplies bytes on every processor; with float32 it may not."""


@contextmanager
def running_peers(
    python: str | None, search_and_learn: Path | None, transformers: bool, int8: bool, candidates: int
) -> Iterator[tuple[dict[str, Peer], list[str]]]:
    """Run the peers for the duration of the context.

    Args:
        python: interpreter with vLLM; see `optional_vllm`.
        search_and_learn: folder with search-and-learn's package `sal`; its own code takes part where there is vLLM.
        transformers: whether the search rewritten on transformers takes part.
        int8: whether search-and-learn's own code takes part with both models in int8, too.
        candidates: samples of one problem at a time.

    Yields:
        The peers by the names of `TITLES`, the strongest baseline last; and remarks: vLLM's version, and why a peer is
        missing.

    Raises:
        EspalierError: no peer is left, or search-and-learn's code is wanted without vLLM.
        VllmError: vLLM does not start.
    """
    generator, verifier = locate(GENERATOR), locate(VERIFIER)
    settings = VllmSettings(
        generator, verifier, max_sequences=max(candidates, 256), search_and_learn=search_and_learn
    )  # room for all candidates in one batch, at least vLLM's default
    peers: dict[str, Peer] = {}
    remarks: list[str] = []
    with ExitStack() as stack:
        vllm = stack.enter_context(optional_vllm(python, settings))
        if search_and_learn and not vllm:
            raise EspalierError("--search-and-learn needs vLLM to run on; name its interpreter with --vllm-python")
        if transformers:
            peers["transformers"] = SearchAndLearn(generator, verifier)
        if vllm:
            remarks.append(vllm.description)
            peers["vllm"] = SearchAndLearn(generator, verifier, vllm)
        if vllm and search_and_learn:
            if int8:
                _start_int8(stack, vllm.python, settings, peers, remarks)
            peers["original"] = OriginalSearchAndLearn(vllm)
        if not peers:
            raise EspalierError("no peer is left: leave out --no-transformers, or name vLLM with --vllm-python")
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
