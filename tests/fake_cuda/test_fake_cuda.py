"""What the fake device refuses, a real one would wait for or fail at."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from espalier.kernels.triton.pointwise import add_norm, take_drawn
from fake_cuda import FakeCuda
from fake_cuda.queue import PinnedMemoryError
from fake_cuda.tensors import DeviceAssertError, HiddenSynchronisationError

GPU = torch.device("cuda")


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    if torch.cuda.is_available():
        pytest.skip("there is a real GPU, which a fake one must not replace")
    fake = FakeCuda(lambda count: torch.arange(count))
    with fake.installed():
        yield fake


@pytest.fixture
def x(cuda: FakeCuda) -> torch.Tensor:
    return torch.arange(12.0).to(GPU).view(3, 4)


def test_a_tensor_says_where_it_is_and_computes_what_it_should(cuda: FakeCuda, x: torch.Tensor):
    assert x.device == torch.device("cuda:0")
    y = F.linear(x, torch.ones(2, 4, device=GPU))
    y[1] += 1
    assert y.device == x.device
    assert y.cpu().tolist() == [[6, 6], [23, 23], [38, 38]]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0, 0].item(),
        lambda x: bool(x.any()),
        lambda x: float(x.sum()),
        lambda x: x.cpu(),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: x.numpy(),
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x[x > 3],
        lambda x: torch.equal(x, x),
        lambda x: x.copy_(torch.ones(3, 4), non_blocking=True),  # pageable memory
        lambda x: torch.ones(3).to(x.device),
        lambda x: torch.empty(3, 4, pin_memory=True).copy_(x),
    ],
)
def test_what_the_host_would_wait_for_raises_while_steps_run(cuda: FakeCuda, x: torch.Tensor, read):
    with cuda.running(), pytest.raises(HiddenSynchronisationError):
        read(x)


def test_tensors_of_host_and_device_or_of_two_devices_do_not_mix(cuda: FakeCuda, x: torch.Tensor):
    for other in (torch.ones(3, 4), torch.ones(3, 4, device="cuda:1")):
        with pytest.raises(AssertionError, match="mixes"):
            x + other
    with pytest.raises(AssertionError, match="mixes"):
        x[torch.tensor([0, 1])]


def test_a_kernel_is_noted_and_its_tensors_must_be_on_the_current_device(cuda: FakeCuda, x: torch.Tensor):
    weight = torch.ones(4, device=GPU)
    add_norm(x, None, weight, 1e-6)
    (launch,) = cuda.launched
    assert (launch.kernel, launch.grid, launch.shapes["hidden"]) == ("add_and_norm", (3,), (3, 4))
    with pytest.raises(AssertionError, match="weight is on the host"):
        add_norm(x, None, torch.ones(4), 1e-6)
    torch.cuda.set_device(1)
    with pytest.raises(DeviceAssertError, match="hidden is on cuda:0, launched on cuda:1"):
        add_norm(x, None, weight, 1e-6)


def test_what_is_fetched_is_not_there_before_it_is_waited_for(cuda: FakeCuda, x: torch.Tensor):
    host, copied = torch.zeros(3, 4, pin_memory=True), torch.cuda.Event()
    with cuda.running() as counted:
        host.copy_(x, non_blocking=True)
        copied.record()
        x.zero_()  # behind the copy
        assert not copied.query()
        assert host[1, 1] != 5
        copied.synchronize()
    assert host[1, 1] == 5
    assert counted["to_host"] == 1


def test_pinned_memory_must_stay_as_it_is_until_its_copy_is_done(cuda: FakeCuda):
    host, device = torch.zeros(4, pin_memory=True), torch.zeros(4, device=GPU)
    copied = torch.cuda.Event()
    for overwrites in (False, True):
        device.copy_(host, non_blocking=True)
        copied.record()
        if overwrites:
            host.numpy()[2] = 7.0
            with pytest.raises(PinnedMemoryError):
                copied.synchronize()
        else:
            copied.synchronize()
            host.numpy()[1] = 5.0


def test_a_graph_does_again_what_was_recorded_over_the_same_memory(cuda: FakeCuda):
    table, ids = torch.arange(8.0, device=GPU).view(4, 2), torch.zeros(3, dtype=torch.int64, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = F.embedding(ids, table) * 2
    ids.fill_(3)
    graph.replay()
    assert found.cpu().tolist() == [[12, 14]] * 3
    ids[1:2].fill_(-1)
    with pytest.raises(DeviceAssertError, match="out of range"):
        graph.replay()


def test_no_graph_joins_a_pool_whose_graphs_are_gone(cuda: FakeCuda):
    pool, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        pass
    del graph
    with pytest.raises(RuntimeError, match="use_count"), torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool):
        pass


def test_drawn_tokens_are_put_in_their_places(cuda: FakeCuda):
    ids = torch.from_numpy(np.array([7, -2, -1], np.int32)).to(GPU)
    take_drawn(ids, torch.tensor([30, 40]).to(GPU))
    assert ids.cpu().tolist() == [7, 40, 30]


def test_work_beside_a_recorded_stream_must_begin_behind_it_and_come_back(cuda: FakeCuda):
    ids, drawn = (
        torch.tensor(values, dtype=dtype).to(GPU) for values, dtype in (([-1], torch.int32), ([7], torch.int64))
    )
    stream, beside = torch.cuda.Stream(), torch.cuda.Stream()

    def record(forks: bool, joins: bool) -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            if forks:
                beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                take_drawn(ids, drawn)
            if joins:
                torch.cuda.current_stream().wait_stream(beside)

    with pytest.raises(AssertionError, match="outside of the graph"):
        record(forks=False, joins=True)
    with pytest.raises(AssertionError, match="not come back"):
        record(forks=True, joins=False)
    record(forks=True, joins=True)
    assert cuda.counts["launches beside"] == 2
