"""Lets Ctrl-C interrupt the engine between two steps, never within one."""

# As `signal`, which wraps it to give enumerations: that costs 2 us a call, and a step makes four.
import _signal as signal  # pyright: ignore[reportMissingImports]
import threading
from _thread import interrupt_main
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_PATIENCE = 2.0
"""Seconds for which an interrupt is held at most: a first step may compile kernels for longer."""


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold back a `KeyboardInterrupt` until the block has ended, but for 2 s at most; a second one comes at once.

    A step that is left halfway has lost track of its blocks, and an exception raised below a compiled function leaves
    it as a `SystemError` (numba runs Python code to box results, and a signal may be handled there). Only Python's own
    handler of SIGINT is replaced, and only on the main thread, where signals are handled.

    Raises:
        KeyboardInterrupt: at the end of the block, when one was held; an error of the block is its context.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    held: threading.Timer | None = None

    def hold(_number: int, _frame: FrameType | None) -> None:
        nonlocal held
        signal.signal(signal.SIGINT, signal.default_int_handler)
        held = threading.Timer(_PATIENCE, interrupt_main)
        held.daemon = True
        held.start()

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if held:
            held.cancel()
            raise KeyboardInterrupt
