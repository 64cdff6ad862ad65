"""Functions are compiled before their first call, their parts first and by several processes, and that is said."""

import dataclasses
import importlib
import io
import sys
import threading
from pathlib import Path
from types import ModuleType

import numba
import pytest
import torch
from layer_steps import random_layer, random_outer

from espalier.kernels.compilation import compiler
from espalier.kernels.compilation.ahead import Compilation, Progress, _Queue, compilation, compile_ahead
from espalier.kernels.compilation.compiler import is_compiled, kept_in
from espalier.kernels.compilation.worker import Worker
from espalier.kernels.cpu import HAS_VNNI
from espalier.kernels.cpu.backend import compilations
from espalier.kernels.cpu.decoder import CpuLayers
from espalier.kernels.cpu.products.int8_linear import pack_int8
from espalier.kernels.cpu.sampling import (
    draw_tokens_cpu,
    filter_logits_cpu,
    mask_tokens_cpu,
    penalize_tokens_cpu,
    sampling_compilations,
)
from espalier.kernels.layers import DecoderSpec
from espalier.kernels.sampling import TokenPenalties

_SOURCE = """
from pathlib import Path
from espalier.kernels.compilation.compiler import INNER, Compiler

compiled = Compiler(Path(__file__).parent)

@compiled(**INNER)
def double(x):
    return 2 * x

@compiled(**INNER)
def triple(x):
    return 3 * x

@compiled()
def both(x):
    return double(x) + triple(x)

@compiled()
def wrong(x):
    return x.nothing
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of compiled functions in a folder of its own."""
    name = f"functions_in_{tmp_path.name}"
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / f"{name}.py").write_text(_SOURCE)
    monkeypatch.syspath_prepend(tmp_path / "sources")
    return importlib.import_module(name)


def whole(functions: ModuleType, example: float = 1) -> Compilation:
    parts = [compilation(functions.double, example), compilation(functions.triple, example)]
    return compilation(functions.both, example, parts=parts)


@pytest.mark.parametrize("cores", [1, 3])
def test_what_is_wanted_is_compiled_with_its_parts_and_called_without_compiling(
    functions: ModuleType, cores: int, capsys: pytest.CaptureFixture[str]
):
    wanted = whole(functions)
    compile_ahead([wanted], cores)
    assert functions.both.overloads
    assert functions.both(7) == 35
    assert all(is_compiled(one.function, one.types) for one in (wanted, *wanted.parts))
    assert "compiling CPU kernels, once for this machine: 0 of 3" in capsys.readouterr().err
    compile_ahead([wanted], cores)
    assert not capsys.readouterr().err


def test_a_new_process_finds_all_of_it_and_says_nothing(functions: ModuleType, capsys: pytest.CaptureFixture[str]):
    compile_ahead([whole(functions)], 1)
    capsys.readouterr()
    again = importlib.reload(functions)
    compile_ahead([whole(again)], 1)
    assert not capsys.readouterr().err
    assert sum(again.both.stats.cache_hits.values()) == 1
    assert not again.both.stats.cache_misses


def test_another_process_compiles_for_this_one(functions: ModuleType):
    wanted = compilation(functions.both, 1.5)
    worker = Worker()
    try:
        assert worker.compile(wanted.function, wanted.types)
    finally:
        worker.stop()
    assert not functions.both.overloads
    assert is_compiled(functions.both, wanted.types)
    assert functions.both(2.0) == 10.0
    assert not functions.both.stats.cache_misses


def test_what_another_process_fails_at_is_left_to_this_one_which_says_why(functions: ModuleType):
    wanted = compilation(functions.wrong, 1)
    worker = Worker()
    try:
        assert not worker.compile(wanted.function, (lambda: "cannot be pickled",))
        assert not worker.compile(wanted.function, wanted.types)
        assert not worker.compile(functions.both, (numba.int64,))  # it has ended
    finally:
        worker.stop()
    with pytest.raises(numba.TypingError, match="nothing"):
        compile_ahead([wanted], 2)


def test_without_other_processes_this_one_does_all(functions: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    compile_ahead([whole(functions)], 4)
    assert functions.both(1) == 5


def test_where_nothing_can_be_kept_this_process_does_all_and_says_so(
    tmp_path: Path, functions: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(compiler, "folder_for_compiled", lambda *_: None)
    unkept = importlib.reload(functions)
    assert kept_in(unkept.both) is None
    compile_ahead([whole(unkept)], 4)
    assert unkept.both(1) == 5
    assert "compiling CPU kernels, which cannot be kept: 0 of 3" in capsys.readouterr().err


def test_nothing_is_compiled_before_its_parts_or_for_two_sets_of_types_at_once(functions: ModuleType):
    of_ints, of_floats = whole(functions, 1), whole(functions, 1.5)
    queue = _Queue([of_ints, of_floats], Progress(None, once=True))
    assert queue.total == 6
    first, second = queue.take(), queue.take()
    assert [first, second] == [*of_ints.parts]
    others: list[Compilation | None] = []
    waiting = threading.Thread(target=lambda: others.append(queue.take()), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert not others  # all that is left is of a function that is being compiled, or waits for its parts
    assert first
    queue.give_back(first)
    waiting.join(5)
    assert others == [first]
    queue.complete(first)
    assert queue.take() == of_floats.parts[0]
    assert second
    queue.complete(second)
    assert {queue.take(), queue.take()} == {of_ints, of_floats.parts[1]}
    queue.end()
    assert queue.take() is None


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_each_step_in_one_line_and_a_log_the_beginning_and_the_end():
    terminal, log = _Terminal(), io.StringIO()
    for stream in (terminal, log):
        with Progress(stream, once=True) as progress:
            for done in range(3):
                progress.show(done, 2)
    line, rest = terminal.getvalue().split("\n")
    assert [text.strip() for text in line.split("\r")[1:-1]] == [
        f"compiling CPU kernels, once for this machine: {done} of 2" for done in range(3)
    ]
    assert line.split("\r")[-1].startswith("compiled CPU kernels, once for this machine: 0.")
    assert not rest
    first, last = log.getvalue().splitlines()
    assert first == "compiling CPU kernels, once for this machine: 0 of 2"
    assert last.startswith("compiled CPU kernels, once for this machine: 0.")


def layers_of(kind: str) -> CpuLayers:
    """One layer in float32 or int8."""
    shape, hidden, inner = DecoderSpec(4, 2, 32, 1e-6, (None,)), 64, 96
    weights = random_layer(0, hidden, inner, shape, bias=True)
    if kind == "int8":
        packed = {
            name: pack_int8((10 * given).to(torch.int8), torch.ones(len(given), 1))
            for name in ("qkv", "out", "gate_up", "down")
            for given in [getattr(weights, name)]
        }
        weights = dataclasses.replace(weights, **packed)
    return CpuLayers(1, lambda _: weights, shape, random_outer(hidden, shape))


def test_parts_are_compiled_ahead_for_the_types_that_they_are_called_with():
    expected: dict[str, set[object]] = {}
    for kind in ("float32", "int8") if HAS_VNNI else ("float32",):
        wanted = compilations(layers_of(kind))
        compile_ahead(wanted, 1)
        for part in (part for one in wanted for part in one.parts):
            expected.setdefault(part.function.__name__, set()).add((part.function, part.types))
    assert len(expected) > 4
    for types in expected.values():
        for function, _ in types:  # what was compiled within another function, for other types, would be kept as well
            index = (key[0] for key in function._cache._cache_file._load_index())
            # Other tests multiply by quantised weights, which these layers have none of.
            assert {(function, kept) for kept in index if "QuantizedPanels" not in str(kept)} == types


def test_no_request_is_the_first_to_compile_what_its_draws_call():
    wanted = {one.key for one in compilations(layers_of("float32"))}
    compiled = sampling_compilations()
    assert {one.key for one in compiled} <= wanted
    for one in compiled:
        one.run()
    known = [set(one.function.overloads) for one in compiled]
    logits, rows, ones = torch.randn(2, 40), torch.arange(2), torch.ones(2)
    tokens = torch.zeros(2, 3, dtype=torch.int32)
    penalize_tokens_cpu(logits, TokenPenalties(rows, tokens, rows, rows + 1, ones, ones, ones))
    masked = mask_tokens_cpu(logits, torch.full((2, 5), 255, dtype=torch.uint8))
    filtered = filter_logits_cpu(masked, ones, rows, ones / 2, ones / 9)
    draw_tokens_cpu(logits, filtered, ones, torch.rand(2, dtype=torch.float64), rows)
    assert [set(one.function.overloads) for one in compiled] == known
