"""Which device each worker of a machine gets."""

import pytest

from espalier.engine.errors import EspalierError
from espalier.experiments.executors.process_transport import assign, visible_gpus
from espalier.search.run.settings import RuntimeSettings, default_cpu_kv_memory


def test_each_worker_has_a_gpu_of_its_own():
    places = assign(RuntimeSettings(device="auto", threads=2), 2, cores=64, gpus=["0", "3", "7"])
    assert [place.environment for place in places] == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "3"}]
    assert [place.runtime for place in places] == [RuntimeSettings(device="cuda", threads=2)] * 2


def test_cores_and_memory_are_shared_out_on_a_cpu():
    places = assign(RuntimeSettings(device="auto"), 3, cores=8, gpus=[])
    assert [place.runtime.threads for place in places] == [2, 2, 2]
    assert {place.runtime.device for place in places} == {"cpu"}
    assert {place.runtime.kv_memory for place in places} == {default_cpu_kv_memory(3)}
    assert 3 * default_cpu_kv_memory(3) <= 3 * default_cpu_kv_memory(1)
    assert not places[0].environment


def test_what_was_asked_for_is_kept():
    (place, _) = assign(RuntimeSettings(device="cpu", threads=4, kv_memory=2**20), 2, cores=4, gpus=[])
    assert (place.runtime.threads, place.runtime.kv_memory) == (4, 2**20)


@pytest.mark.parametrize(
    ("device", "gpus", "words"),
    [
        ("auto", ["0", "1"], "--workers 3: each needs a GPU of its own, and there are 2; lower --workers, or choose"),
        ("cuda", [], "a GPU of its own, and there are 0"),
        ("cuda", ["0"], "a GPU of its own, and there is 1"),
        ("cpu", [], "--workers 3: each needs a core of its own, and there are 2; lower --workers"),
    ],
)
def test_more_workers_than_devices_are_refused_with_the_numbers(device: str, gpus: list[str], words: str):
    with pytest.raises(EspalierError, match=words):
        assign(RuntimeSettings(device=device), 3, cores=2, gpus=gpus)


@pytest.mark.parametrize(
    ("visible", "count", "names"),
    [
        (None, 2, ["0", "1"]),
        ("2,5", 2, ["2", "5"]),
        ("GPU-8f2b, GPU-77aa ,GPU-1c", 2, ["GPU-8f2b", "GPU-77aa"]),  # the third does not exist
        ("", 0, []),
    ],
)
def test_gpus_are_named_as_the_environment_names_them(visible, count, names, monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == names
