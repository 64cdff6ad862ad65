"""The examples in the docstrings of the clients run as they stand, but for the address."""

import ast
import asyncio
import inspect
import re
import textwrap
from typing import Any

import pytest

from espalier.search import client


def example(documented: Any) -> str:
    """The last indented block of a docstring that uses a client."""
    text = inspect.getdoc(documented) or ""
    blocks = re.findall(r"(?:^(?: {4}.*)?\n?)+", text, re.MULTILINE)
    return textwrap.dedent([block for block in blocks if "with " in block][-1])


@pytest.mark.parametrize(
    "documented", [client, client.SearchClient, client.AsyncSearchClient], ids=lambda d: d.__name__
)
def test_an_example_of_a_docstring_runs(documented: Any, start, capsys):
    code = example(documented).replace("127.0.0.1:50051", start().address)
    compiled = compile(code, documented.__name__, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    async def run() -> None:
        running = eval(compiled, vars(client).copy())
        if inspect.isawaitable(running):
            await running

    asyncio.run(run())
    assert capsys.readouterr().out == "42\n"
