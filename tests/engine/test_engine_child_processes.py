"""Child processes leave the program's main module alone, unless what they run is in it."""

import subprocess
import sys
from functools import partial
from pathlib import Path

from espalier.engine.child_processes import context_without_main, is_of_main

_SCRIPT = """
print("runs", __name__, flush=True)
import os
from espalier.engine.child_processes import context_without_main
child = context_without_main().Process(target=os._exit, args=(7,))
child.start()
child.join()
print("exit code", child.exitcode)
"""


def test_a_script_without_a_guard_runs_once(tmp_path: Path):
    (tmp_path / "script.py").write_text(_SCRIPT)
    ran = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines() == ["runs __main__", "exit code 7"], ran.stderr


def test_contexts_of_others_stay_as_they_are():
    from multiprocessing import get_context, spawn

    before = spawn.get_preparation_data
    assert context_without_main().Process is not get_context("spawn").Process
    assert spawn.get_preparation_data is before


def test_functions_of_the_main_module_are_known_within_a_partial_too():
    def of_main(*_: str) -> bool:
        return True

    of_main.__module__ = "__main__"
    assert is_of_main(of_main)
    assert is_of_main(partial(of_main, "1"))
    assert is_of_main(partial(is_of_main, of_main))
    assert not is_of_main(partial(is_of_main, "1"))
    assert not is_of_main(is_of_main)
