from collections.abc import Iterator

import pytest
import torch

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
    for device, dtype in (("cpu", torch.bfloat16), ("meta", torch.float32), ("cuda:1", torch.float32)):
        assert type(choose_backend(device, dtype)) is TorchBackend


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
