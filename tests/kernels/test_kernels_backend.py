from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from espalier.kernels import backend as backends
from espalier.kernels.backend import choose_backend
from espalier.kernels.cpu import threads as workers
from espalier.kernels.cpu.backend import CpuBackend
from espalier.kernels.torch_backend import TorchBackend


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = workers.num_threads(), torch.get_num_threads()
    yield
    workers.set_threads(before[0])
    torch.set_num_threads(before[1])


def test_float32_on_cpu_is_compiled_and_all_else_is_torchs():
    assert isinstance(choose_backend("cpu", torch.float32), CpuBackend)
    for device, dtype in (("cpu", torch.bfloat16), ("meta", torch.float32)):
        assert type(choose_backend(device, dtype)) is TorchBackend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_has_tritons_backend_where_triton_is_installed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    from espalier.kernels.triton.backend import TritonBackend

    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 * 1024, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for batch_invariant in (False, True):
        backend = choose_backend("cuda:1", dtype, batch_invariant)
        assert isinstance(backend, TritonBackend)
        assert backend.rows_are_independent is batch_invariant
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    assert type(choose_backend("cuda:1", dtype)) is TorchBackend


def test_where_no_backend_computes_a_row_alike_in_any_batch_that_is_said():
    assert choose_backend("cpu", torch.float32, batch_invariant=True).rows_are_independent
    with pytest.raises(ValueError, match=r"no backend for torch\.bfloat16 on cpu computes a row alike"):
        choose_backend("cpu", torch.bfloat16, batch_invariant=True)


def test_the_compiled_backend_leaves_torch_one_thread(threads_restored: None):
    torch.set_num_threads(2)
    CpuBackend().set_threads(3)
    assert (workers.num_threads(), torch.get_num_threads()) == (3, 1)
    CpuBackend().set_threads(None)
    assert (workers.num_threads(), torch.get_num_threads()) == (3, 1)


def test_torchs_backend_sets_torchs_threads_alone(threads_restored: None):
    workers.set_threads(5)
    TorchBackend().set_threads(2)
    TorchBackend().set_threads(None)
    assert (workers.num_threads(), torch.get_num_threads()) == (5, 2)
