"""The choice of a backend, by the kind of device: `Backend` is all that the engine may ask of one."""

import logging
from importlib.util import find_spec

import torch

from espalier.kernels.torch_backend import TorchBackend

Backend = TorchBackend
"""The contract, whose operations are torch's until a subclass has its own."""


def choose_backend(device: torch.device | str, dtype: torch.dtype, batch_invariant: bool = False) -> Backend:
    """The fastest backend for models of `dtype` on `device`; nothing else chooses between backends.

    Raises:
        ValueError: when rows are to be independent of their batch (`batch_invariant`), and no backend's are.
    """
    if torch.device(device).type == "cpu" and dtype == torch.float32:
        from espalier.kernels.cpu.backend import CpuBackend  # numba takes half a second to import

        return CpuBackend()
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu and find_spec("triton"):
        from espalier.kernels.triton.backend import TritonBackend  # triton comes with torch's builds for GPUs
        from espalier.kernels.triton.plan import Costs
        from espalier.kernels.triton.recording import GraphRecorder

        card = torch.cuda.get_device_properties(device)
        costs = Costs(card.multi_processor_count, card.shared_memory_per_block_optin, dependent=card.major >= 9)
        return TritonBackend(costs, GraphRecorder(), batch_invariant=batch_invariant)
    if batch_invariant:
        raise ValueError(f"no backend for {dtype} on {device} computes a row alike in any batch")
    if on_gpu:
        logging.getLogger(__name__).warning(
            "triton is not installed: steps on %s use torch's operations, which wait for the device in every layer",
            device,
        )
    return TorchBackend()
