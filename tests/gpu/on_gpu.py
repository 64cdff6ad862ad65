"""What the tests on a GPU share; nothing here imports more than the kernels need."""

import torch

DEVICE = torch.device("cuda")


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, as a share of that of what is expected; nothing that is not a number passes."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())


def moved(view: torch.Tensor) -> torch.Tensor:
    """The same view of the same memory on the device."""
    storage = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()).to(DEVICE)
    return storage.as_strided(view.shape, view.stride(), view.storage_offset())
