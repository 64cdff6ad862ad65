"""Clients of others call tools: each reads a call of the server's, sends its result, and reads the answer.

The clients are unmodified and in an environment of their own. Behind the server a generator says a script: a call, and
once it has the result, the answer.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_thread import ServerThread
from tiny_models import edit_json
from tool_callers import tool_caller, write_tool_caller

from espalier.engine.models.checkpoint import Checkpoint
from espalier.search.run.orchestrator import Orchestrator

pytestmark = pytest.mark.tools

END = "<|im_end|>"
"""Ends a turn of the generator."""


def call(name: str, **arguments: Any) -> str:
    """A call as the generator writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


WEATHER = call("get_weather", city="Oslo", days=3)
ROUND = (WEATHER, END, "Rain in Oslo.", END)
CALLED = ["get_weather", {"city": "Oslo", "days": 3}]
"""The call as a client is to hold it."""

OPENAI = """
import json
import openai
from pydantic import BaseModel

class get_weather(BaseModel):
    "Forecast of a city"
    city: str
    days: int

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
tool = openai.pydantic_function_tool(get_weather)
asked = {"role": "user", "content": "Weather in Oslo?"}
"""
CHATS = """
def whole(messages):
    return client.chat.completions.create(model=MODEL, messages=messages, tools=[tool]).choices[0].message

def streamed(messages):
    message = {"role": "assistant", "content": None}
    for chunk in client.chat.completions.create(model=MODEL, messages=messages, tools=[tool], stream=True):
        delta = chunk.choices[0].delta
        if delta.content:
            message["content"] = (message["content"] or "") + delta.content
        for part in delta.tool_calls or ():
            calls = message.setdefault("tool_calls", [])
            if part.index == len(calls):
                function = {"name": part.function.name, "arguments": ""}
                calls.append({"id": part.id, "type": part.type, "function": function})
            calls[part.index]["function"]["arguments"] += part.function.arguments
    return openai.types.chat.ChatCompletionMessage(**message)

def helped(messages):
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=[tool]) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.done":
                assert event.parsed_arguments == get_weather(city="Oslo", days=3)
        return stream.get_final_completion().choices[0].message

for take in (whole, streamed, helped):
    message = take([asked])
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    answer = take([asked, message, result])
    called = call.function
    say(called.name, json.loads(called.arguments), message.content or None, answer.content, answer.tool_calls)
"""
RESPONSES = """
tool = {"type": "function", **tool["function"]}

def whole(items):
    return client.responses.create(model=MODEL, input=items, tools=[tool])

def streamed(items):
    with client.responses.stream(model=MODEL, input=items, tools=[tool]) as stream:
        kinds = [event.type for event in stream]
        assert kinds[-1] == "response.completed"
        return stream.get_final_response()

for take in (whole, streamed):
    items = [asked]
    response = take(items)
    (call,) = response.output
    items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    answer = take(items)
    say(call.name, json.loads(call.arguments), response.output_text or None, answer.output_text, None)
"""
ANTHROPIC = """
import anthropic

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
schema = {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]
}
tool = {"name": "get_weather", "description": "Forecast of a city", "input_schema": schema}
asked = {"role": "user", "content": "Weather in Oslo?"}

def whole(messages):
    return client.messages.create(model=MODEL, max_tokens=400, messages=messages, tools=[tool])

def streamed(messages):
    with client.messages.stream(model=MODEL, max_tokens=400, messages=messages, tools=[tool]) as stream:
        assert sum(event.type == "content_block_stop" for event in stream) == 1
        return stream.get_final_message()

for take in (whole, streamed):
    message = take([asked])
    (call,) = message.content
    assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    answer = take([asked, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}])
    say(call.name, call.input, None, answer.content[0].text, None)

@anthropic.beta_tool
def get_weather(city: str, days: int) -> str:
    \"\"\"Forecast of a city

    Args:
        city: its name
        days: how many
    \"\"\"
    held.extend(["get_weather", {"city": city, "days": days}, None])
    return "rain"

held = []
runner = client.beta.messages.tool_runner(model=MODEL, max_tokens=400, messages=[asked], tools=[get_weather])
answer = runner.until_done()
say(*held, answer.content[0].text, None)
"""
LANGCHAIN = """
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

@tool
def get_weather(city: str, days: int) -> str:
    "Forecast of a city"
    return "rain"

def streamed(bound, messages):
    chunks = list(bound.stream(messages))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole

for responses in (False, True):
    model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_retries=0, use_responses_api=responses)
    bound = model.bind_tools([get_weather])
    for take in (type(bound).invoke, streamed):
        messages = [("user", "Weather in Oslo?")]
        messages.append(message := take(bound, messages))
        (call,) = message.tool_calls
        messages.append(get_weather.invoke(call))
        answer = take(bound, messages)
        say(call["name"], call["args"], message.text or None, answer.text, answer.tool_calls or None)
"""
LANGCHAIN_STRUCTURED = """
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

class Coins(BaseModel):
    "How many coins there are"
    coins: int

model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_retries=0)
for method in ("function_calling", "json_schema"):
    say(type(found := model.with_structured_output(Coins, method=method).invoke("How many?")).__name__, found.coins)
"""
PYDANTIC_AI = """
import asyncio
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

class Forecast(BaseModel):
    rain: bool

held = []

def get_weather(city: str, days: int) -> str:
    "Forecast of a city"
    held.append(["get_weather", {"city": city, "days": days}])
    return "rain"

async def streamed(agent):
    async with agent.run_stream("Weather in Oslo?") as run:
        return await run.get_output()

async def main():
    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider=provider)
        agent = Agent(model, tools=[get_weather], instructions="Be brief.")
        say((await agent.run("Weather in Oslo?")).output, held.pop())
        say(await streamed(agent), held.pop())
        agent = Agent(model, tools=[get_weather], output_type=Forecast)
        say((await agent.run("Rain in Oslo?")).output.model_dump(), held.pop())

asyncio.run(main())
"""
AGENTS = """
import asyncio
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
held = []

@function_tool
def get_weather(city: str, days: int) -> str:
    "Forecast of a city"
    held.append(["get_weather", {"city": city, "days": days}])
    return "rain"

async def streamed(agent):
    run = Runner.run_streamed(agent, "Weather in Oslo?")
    async for _ in run.stream_events():
        pass
    return run.final_output

async def main():
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent("forecaster", instructions="Be brief.", model=kind(MODEL, client), tools=[get_weather])
        say((await Runner.run(agent, "Weather in Oslo?")).final_output, held.pop())
        say(await streamed(agent), held.pop())

asyncio.run(main())
"""
SMOLAGENTS = """
from smolagents import OpenAIModel, ToolCallingAgent, tool

held = []

@tool
def get_weather(city: str, days: int) -> str:
    \"\"\"Forecast of a city

    Args:
        city: its name
        days: how many
    \"\"\"
    held.append(["get_weather", {"city": city, "days": days}])
    return "rain"

model = OpenAIModel(MODEL, api_base=f"{URL}/v1", api_key="none")
for stream in (False, True):
    agent = ToolCallingAgent([get_weather], model, verbosity_level=0, stream_outputs=stream)
    say(agent.run("Weather in Oslo?"), held.pop())
"""
LITELLM = """
import json
import litellm

schema = {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]
}
tool = {"type": "function", "function": {"name": "get_weather", "description": "Forecast", "parameters": schema}}
asked = {"role": "user", "content": "Weather in Oslo?"}

def take(messages, stream, **route):
    answer = litellm.completion(messages=messages, tools=[tool], api_key="none", stream=stream, **route)
    whole = litellm.stream_chunk_builder(list(answer)) if stream else answer
    return whole.choices[0].message

for route in (
    {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1"}, {"model": f"anthropic/{MODEL}", "api_base": URL}
):
    for stream in (False, True):
        message = take([asked], stream, **route)
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        answer = take([asked, message, result], stream, **route)
        called = call.function
        say(called.name, json.loads(called.arguments), message.content or None, answer.content, answer.tool_calls)
"""
STRUCTURED = """
import asyncio
import anthropic, litellm, openai
from agents import Agent as OpenAIAgent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, set_tracing_disabled
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

class Coins(BaseModel):
    coins: int

v1, asked = f"{URL}/v1", [{"role": "user", "content": "How many?"}]
client = openai.OpenAI(base_url=v1, api_key="none", max_retries=0)
found = client.chat.completions.parse(model=MODEL, messages=asked, response_format=Coins)
say("chat", found.choices[0].message.parsed.coins)
found = client.responses.parse(model=MODEL, input=asked, text_format=Coins)
say("response", found.output_parsed.coins)
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
found = client.messages.parse(model=MODEL, max_tokens=400, messages=asked, output_format=Coins)
say("message", found.parsed_output.coins)
for route in ({"model": f"openai/{MODEL}", "api_base": v1}, {"model": f"anthropic/{MODEL}", "api_base": URL}):
    found = litellm.completion(messages=asked, response_format=Coins, api_key="none", **route)
    say("litellm", Coins.model_validate_json(found.choices[0].message.content).coins)

async def main():
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=v1, api_key="none"))
    found = await Agent(model, output_type=NativeOutput(Coins)).run("How many?")
    say("pydantic-ai", found.output.coins)
    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=v1, api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        found = await Runner.run(OpenAIAgent("counter", model=kind(MODEL, client), output_type=Coins), "How many?")
        say("agents", found.final_output.coins)

asyncio.run(main())
"""

HELD = [*CALLED, None, "Rain in Oslo.", None]
"""What a client holds of a round: name, arguments, text beside the call, the answer, and its calls."""
COINS = ('{"coins": 73}', END)
FORECAST = (WEATHER, END, call("final_result", rain=True), END)
FINAL = (WEATHER, END, call("final_answer", answer="Rain in Oslo."), END)
ANSWERED = ["Rain in Oslo.", CALLED]
CLIENTS: dict[str, tuple[str, tuple[str, ...], list[Any]]] = {
    # what it does, what the generator says, what it prints
    "openai's chats": (OPENAI + CHATS, ROUND * 3, [HELD] * 3),
    "openai's responses": (OPENAI + RESPONSES, ROUND * 2, [HELD] * 2),
    "anthropic's messages": (ANTHROPIC, ROUND * 3, [HELD] * 3),
    "langchain": (LANGCHAIN, ROUND * 4, [HELD] * 4),
    "langchain's structured output": (
        LANGCHAIN_STRUCTURED, (call("Coins", coins=73), END, *COINS), [["Coins", 73]] * 2,
    ),
    "structured outputs": (
        STRUCTURED, (*COINS * 4, call("json_tool_call", coins=73), END, *COINS * 3),
        [[who, 73] for who in ("chat", "response", "message", "litellm", "litellm", "pydantic-ai", "agents", "agents")],
    ),
    "pydantic-ai": (
        PYDANTIC_AI, (*ROUND, *ROUND, *FORECAST) * 2, [ANSWERED, ANSWERED, [{"rain": True}, CALLED]] * 2,
    ),
    "openai's agents": (AGENTS, ROUND * 4, [ANSWERED] * 4),
    "smolagents": (SMOLAGENTS, FINAL * 2, [ANSWERED] * 2),
    "litellm": (LITELLM, ROUND * 4, [HELD] * 4),
}  # fmt: skip
PREFIX = """
import json, sys
URL, MODEL = sys.argv[1:]
def say(*values): print("\\nheld", json.dumps(values), flush=True)
"""


@pytest.fixture
def say(
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
    make_orchestrator: Callable[..., Orchestrator],
    start: Callable[..., ServerThread],
) -> Callable[..., ServerThread]:
    """Starts a server of a generator that says a script, with room for the long prompts of agents."""
    write_tool_caller(tiny_checkpoints["talker"], tmp_path / "caller")
    edit_json(tmp_path / "caller/config.json", {"max_position_embeddings": 2**15})
    checkpoint = Checkpoint(tmp_path / "caller")

    def start_server(*script: str) -> ServerThread:
        orchestrator = make_orchestrator(tool_caller(checkpoint, *script), None, kv_memory_bytes=2**26)
        server = start(lambda: orchestrator, http_port=0)
        server.wait_loaded()
        return server

    return start_server


@pytest.mark.parametrize("model", ["espalier@plain", "espalier@greedy"])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_reads_a_call_sends_its_result_and_reads_the_answer(
    client: str, model: str, say: Callable[..., ServerThread], tool: Callable[[str, str], Path], tmp_path: Path
) -> None:
    program, script, held = CLIENTS[client]
    file = tmp_path / "client.py"  # smolagents reads the source of its tools
    file.write_text(PREFIX + program)
    command = [tool("clients", "python"), file, say(*script).url or "", model]
    told = {**os.environ, "NO_PROXY": "*", "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    ended = subprocess.run(command, cwd=tmp_path, env=told, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:] + ended.stdout[-2000:]
    lines = [line.removeprefix("held ") for line in ended.stdout.splitlines() if line.startswith("held ")]
    assert list(map(json.loads, lines)) == held
