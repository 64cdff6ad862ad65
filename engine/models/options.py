"""Choices of how a checkpoint's weights are read; a command line can name them without importing torch."""

from enum import StrEnum

GGUF = ".gguf"
"""Suffix of GGUF files; one holds tensors and all that small files say."""


class LoadFormat(StrEnum):
    """Formats of weight files."""

    AUTO = "auto"
    """safetensors where there are any, else `.bin`."""
    SAFETENSORS = "safetensors"
    BIN = "bin"
    """`pytorch_model*.bin`, read without running pickled code."""
    DUMMY = "dummy"
    """No file: random weights of the shapes in config.json, for tests of speed. Answers mean nothing."""


class ModelImpl(StrEnum):
    """Code that runs a decoder."""

    AUTO = "auto"
    """Espalier's own where it knows the model type, else transformers'."""
    NATIVE = "native"
    TRANSFORMERS = "transformers"


class Quantization(StrEnum):
    """Formats of the weights of a decoder's matrix products; embeddings, norms, verifiers' heads stay."""

    AUTO = "auto"
    """int8 for large models on a CPU that multiplies bytes, else none; see `decoder.chosen_quantization`."""
    NONE = "none"
    INT8 = "int8"
    """A byte each, with a scale for every output; on a CPU with AVX-512 VNNI activations are rounded to bytes, too."""
    INT4 = "int4"
    """Half a byte each, with a scale and a zero for every output and 64 inputs."""
