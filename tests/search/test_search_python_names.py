"""Errors of the Python interface name arguments; those of the command name flags."""

import pytest

from espalier import EspalierError, Scorer, Solver
from espalier.engine.errors import InvalidRequestError, PoolTooSmallError, Violation
from espalier.search.solver import in_python, python_names


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("--kv-memory, -N, -M or --max-tokens", "kv_memory, beam_width, expansion or max_tokens"),
        ("--verifier-family 'x' is none of y", "verifier_family 'x' is none of y"),
        ("learn-verifier --trunk made it; solve --trace", "learn-verifier --trunk made it; solve --trace"),
        *((same, same) for same in ("Qwen2.5-N", "a-N-b", "--max-tokens-of-all", "x--seed", "--", "")),
    ],
)  # fmt: skip
def test_flags_of_declared_fields_become_the_names_of_arguments(said: str, meant: str):
    assert in_python(said) == meant


def test_errors_keep_their_kind_and_their_parts():
    with (
        pytest.raises(PoolTooSmallError, match="raise kv_memory, or lower beam_width, expansion, max_tokens") as pool,
        python_names(),
    ):
        raise PoolTooSmallError(2**20, 2**10)
    assert pool.value.needed_bytes == 2**20
    with pytest.raises(InvalidRequestError) as caught, python_names():
        raise InvalidRequestError([Violation("time_limit", "needs --seed")])
    assert str(caught.value) == "time_limit: needs seed"
    assert caught.value.violations == [Violation("time_limit", "needs seed")]


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float33"}, {"device": "tpu"}, {"generator": "nowhere"}, {"verifier": "nowhere"}, {"kv_memory": "1K"},
        {"verifier": "self", "verifier_reference": "x"}, {"verifier_family": "nowhere"}, {"thought_marks": "x"},
    ],
)  # fmt: skip
def test_a_bad_argument_of_a_solver_is_named_as_it_is_written(settings: dict[str, str]):
    with pytest.raises(EspalierError) as caught:
        Solver(**settings)  # pyright: ignore[reportArgumentType]
    assert list(settings)[-1] in str(caught.value)
    assert "--" not in str(caught.value)


def test_a_scorer_likewise():
    with pytest.raises(EspalierError, match="verifier: no checkpoint 'nowhere'") as caught:
        Scorer("nowhere")
    assert "--" not in str(caught.value)
