"""The program of a process that compiles one grammar, to find out whether that ends: a line of JSON says which.

A small schema may take minutes and gigabytes to compile, within any of the library's own limits, and a thread cannot
be ended. The system ends this process once it has computed too long, or cannot have more memory. If it comes to its
end, it says how many bytes the grammar holds. Searches that run go before it.

It imports nothing but the library and Python's own: it starts in about 0.1 s.
"""

import json
import os
import signal
import sys

_NICE = 5
"""A third of the processor time of what serves."""


def mapped() -> int:
    """Bytes of memory that this process has; 0 where the system does not say."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * os.sysconf("SC_PAGESIZE")


def limit(seconds: float, memory: int) -> None:
    """Have the system end this process after so many seconds of computing, and give it so many bytes more at most."""
    os.nice(_NICE)
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
    if sys.platform == "linux":
        import resource

        most = mapped() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    asked = json.loads(sys.stdin.readline())
    tokenizer, before = LLTokenizer("byte"), mapped()
    limit(asked["seconds"], asked["memory"])
    matcher = LLMatcher(tokenizer, asked["source"], log_level=0, limits=LLParserLimits(**asked["limits"]))
    matcher.compute_bitmask()
    print(mapped() - before)
