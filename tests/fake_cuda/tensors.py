"""Tensors of the fake device."""

from typing import Any

import torch


class CudaTensor(torch.Tensor):
    """A tensor that says it is on a GPU.

    Torch itself takes it for one of its device `meta`, which holds no values and has no driver that must be there.

    Attributes:
        held: the values, on the host.
        index: of the device.
    """

    held: torch.Tensor
    index: int

    @staticmethod
    def __new__(cls, held: torch.Tensor, index: int) -> "CudaTensor":
        with torch.inference_mode(False):  # as a view of an ordinary tensor is an ordinary one there too
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                held.shape,
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=torch.device("meta"),
            )
        made.held, made.index = held, index
        return made

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    @property
    def is_cuda(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise HiddenSynchronisationError("numpy() of a tensor on the device")

    def tolist(self) -> Any:
        raise HiddenSynchronisationError("tolist() of a tensor on the device")

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({list(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a tensor of a fake device that is not installed on this thread")


class HiddenSynchronisationError(AssertionError):
    """The host would wait for the device where nothing says so."""


class DeviceAssertError(RuntimeError):
    """A kernel read outside of its memory, after which a real device is of no use to the process."""
