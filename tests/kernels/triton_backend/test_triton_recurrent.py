"""Convolutions, delta rule and scans under Triton's interpreter, against those in torch."""

import pytest
import torch
from fake_cuda import FakeCuda
from recurrent_problems import CASES, FILLING, LENGTHS, places_of

from espalier.kernels.recurrent import StateRows
from espalier.kernels.torch_backend import TorchBackend
from espalier.kernels.triton.backend import TritonBackend
from espalier.kernels.triton.recurrent import causal_convolution, gated_recurrence, keep_last


@pytest.mark.parametrize("case", CASES)
def test_rows_of_any_length_equal_torchs_and_states_are_written_where_they_belong(case: str):
    torch.manual_seed(0)
    problem = CASES[case](sum(LENGTHS) + FILLING)
    results, memories = [], [problem.memory.clone(), problem.memory.clone()]
    for backend, memory in zip((TritonBackend(), TorchBackend()), memories, strict=True):
        found = problem.run(backend, memory, LENGTHS, places_of(problem.elements), slice(None))
        results.append(found[: sum(LENGTHS)])
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(memories[0], memories[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_rows_without_tokens_change_no_state_and_no_other_row(case: str):
    torch.manual_seed(0)
    problem, lengths = CASES[case](5), (2, 3)
    places = places_of(problem.elements)[:2]
    alone, filled = problem.memory.clone(), problem.memory.clone()
    expected = problem.run(TritonBackend(), alone, lengths, places, slice(None))
    found = problem.run(TritonBackend(), filled, (*lengths, 0, 0), (*places, places[-1], places[-1]), slice(None))
    assert torch.equal(found, expected)
    assert torch.equal(filled, alone)


def test_the_last_of_each_rows_hidden_states_is_kept():
    memory, hidden = torch.zeros(2000), torch.randn(7, 300)
    rows = StateRows(memory, *map(torch.tensor, ([0, 5, 6, 6], [-1, 0, 0], [1000, 0, 0])))
    keep_last(hidden, rows)
    assert torch.equal(memory[1000:1300], hidden[4])
    assert torch.equal(memory[:300], hidden[5])
    assert memory.count_nonzero() == 600


def test_nothing_waits_for_the_device():
    if torch.cuda.is_available():
        pytest.skip("there is a real GPU, which a fake one must not replace")
    with FakeCuda(torch.zeros).installed() as cuda:

        def on_device(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype).to("cuda")

        x, heads, of_heads, size = on_device(9, 64), on_device(9, 4, 16), on_device(9, 4), on_device(9, 16)
        places = [torch.tensor(each).to("cuda") for each in ([0, 5, 6], [0, -1], [0, 4096])]
        rows = StateRows(on_device(8192, dtype=torch.float32), *places)
        weight, of_model = on_device(64, 4), on_device(4, dtype=torch.float32)
        rates = on_device(64, 16, dtype=torch.float32)
        with cuda.running() as counted:
            causal_convolution(x[:, :40], weight[:40], None, True, rows)
            gated_recurrence(heads, heads, heads, of_heads, of_heads, rows)
            TritonBackend().state_space_scan(heads, of_heads, of_model, heads, heads, of_model, rows)
            TritonBackend().selective_scan(x, x, rates, size, size, None, rows)
    assert counted["blocking"] == 0
    kernels = [launch.kernel for launch in cuda.launched]
    assert kernels == ["convolve_tokens", "keep_inputs", "recur_heads", "recur_heads", "scan_channels"]
