"""A CUDA device for tests on a machine without one; see README.md."""

from fake_cuda.device import FakeCuda

__all__ = ["FakeCuda"]
