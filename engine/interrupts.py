"""Lets Ctrl-C interrupt the engine between two steps, never within one."""

# As `signal`, which wraps it to give enumerations: that costs 2 us a call, and a step makes four.
import _signal as signal  # pyright: ignore[reportMissingImports]
import threading
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_PATIENCE = 2.0
"""Seconds for which an interrupt is held at most: a first step may compile kernels for longer."""


class _LastingHandler:
    """Python's own handler of SIGINT that also remembers the interrupt."""

    interrupted = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        signal.default_int_handler(number, frame)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def lasting_interrupts() -> Iterator[Callable[[], bool]]:
    """Let no engine begin another step within the block once Ctrl-C was pressed; SIGTERM is taken for Ctrl-C.

    Python drops a `KeyboardInterrupt` that is raised in a weak reference's callback or a `__del__` ("Exception ignored
    in"), and a command would go on as if nobody had pressed it.

    Yields a function that says whether there was a SIGTERM. Handlers that somebody else has set stay.
    """
    terminated = False

    def terminate(_number: int, _frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a script
            signal.signal(signal.SIGINT, _LastingHandler())
        signal.raise_signal(signal.SIGINT)

    wanted = (
        (signal.SIGINT, _LastingHandler(), signal.default_int_handler),
        (signal.SIGTERM, terminate, signal.SIG_DFL),
    )
    before = {number: signal.getsignal(number) for number, *_ in wanted}
    ours = [(number, handler) for number, handler, usual in wanted if before[number] == usual and _on_main_thread()]
    for number, handler in ours:
        signal.signal(number, handler)
    try:
        yield lambda: terminated
    finally:
        for number, _ in ours:
            signal.signal(number, before[number])
        if terminated and before[signal.SIGINT] == signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold back a `KeyboardInterrupt` until the block has ended, but for 2 s at most; a second one comes at once.

    A step that is left halfway has lost track of its blocks, and an exception raised below a compiled function leaves
    it as a `SystemError` (numba runs Python code to box results, and a signal may be handled there). Only Python's own
    handler of SIGINT and that of `lasting_interrupts` are replaced, and only on the main thread, where signals are
    handled.

    Raises:
        KeyboardInterrupt: at the end of the block, when one was held; an error of the block is its context. Before the
            block, if `lasting_interrupts` knows of one.
    """
    handler = signal.getsignal(signal.SIGINT)
    lasting = isinstance(handler, _LastingHandler)
    if not _on_main_thread() or not (lasting or handler is signal.default_int_handler):
        yield
        return
    if lasting and handler.interrupted:
        raise KeyboardInterrupt
    held: threading.Timer | None = None

    def hold(_number: int, _frame: FrameType | None) -> None:
        nonlocal held
        signal.signal(signal.SIGINT, handler)
        held = threading.Timer(_PATIENCE, interrupt_main)
        held.daemon = True
        held.start()

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            held.cancel()
            raise KeyboardInterrupt
