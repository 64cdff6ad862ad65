"""The program of a process that compiles one grammar, to find out whether that ends: a line of JSON says which.

A small schema may take minutes and gigabytes to compile, within any of the library's own limits, and a thread cannot
be ended. The system ends this process once it has computed too long, or cannot have more memory.

It imports nothing but the library and Python's own: it starts in about 0.1 s.
"""

import json
import signal
import sys


def limit(seconds: float, memory: int) -> None:
    """Have the system end this process after so many seconds of computing, and give it so many bytes at most."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


if __name__ == "__main__":
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    asked = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer("byte")
    limit(asked["seconds"], asked["memory"])
    LLMatcher(tokenizer, asked["source"], log_level=0, limits=LLParserLimits(**asked["limits"])).compute_bitmask()
