"""Results of a step as one copy: packed on the device, unpacked on the host."""

import torch

from espalier.engine.execution.runner import BatchInFlight, pack, unpack


def test_what_was_packed_is_unpacked_bit_for_bit():
    results = [
        torch.tensor([5, 2**40, -1]),
        torch.tensor([-0.5, float("nan"), 1e-30]),
        torch.rand(2, 3),
        torch.empty(0, 1),
    ]
    found = unpack(pack(results), results)
    assert [t.dtype for t in found] == [t.dtype for t in results]
    for one, other in zip(found, results, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_results_on_a_cpu_are_handed_on_as_they_are():
    ids, log_probabilities, read = torch.tensor([3]), torch.tensor([-1.5]), torch.rand(2, 1)
    values, found_ids, found_log = BatchInFlight([read], ids, log_probabilities).wait()
    assert values[0].ctypes.data == read.data_ptr()
    assert (found_ids.tolist(), found_log.tolist()) == ([3], [-1.5])
