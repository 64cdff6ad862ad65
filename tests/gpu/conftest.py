"""Tests that need a GPU, and only these: each file says how much of Espalier it imports."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = None if torch.cuda.is_available() else "no GPU, or torch is built without CUDA"
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session", autouse=True)
def no_interpreter() -> None:
    if not torch.cuda.is_available():
        return
    from triton import knobs

    if knobs.runtime.interpret:
        pytest.fail("kernels must be compiled here: run with TRITON_INTERPRET=0")
