"""How a checkpoint's weights are read: plain choices, so that a command line can name them without importing torch."""

from enum import StrEnum


class LoadFormat(StrEnum):
    """Which files weights come from."""

    AUTO = "auto"
    """safetensors where there are any, else `.bin`."""
    SAFETENSORS = "safetensors"
    BIN = "bin"
    """`pytorch_model*.bin`, read without running anything that is pickled in it."""
    DUMMY = "dummy"
    """No file: random weights of the shapes in config.json, for tests of speed. Answers mean nothing."""
