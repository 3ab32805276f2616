"""Third-party clients call tools through the server, with and without streams; the tests check their users' results.

The model is scripted: it calls `get_weather` twice, and answers with the results.
"""

import gc
import json
import re
import warnings
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.support.scripted import MODEL, listening, scripted

ASKED = "How is the weather in Paris and in Zürich?"
CALLS = [{"city": "Paris", "days": 3}, {"city": 'a < b & "Zürich"\n', "days": 1}]
THOUGHT, BEHIND = "Two cities, two calls.", "Both together: "


def weather(city: str, days: int) -> str:
    return f"{len(city)} degrees on day {days}"


RESULTS = [weather(**call) for call in CALLS]
ANSWER = f"{BEHIND}{'; '.join(RESULTS)}."


def written(call: dict[str, Any]) -> str:
    rows = (f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in call.items())
    return f"<tool_call>get_weather\n{''.join(rows)}\n</tool_call>"


def script(prompt: str) -> str:
    """Makes calls first; if there are results after the last question, the answer."""
    talk = prompt.rpartition("<role>HUMAN</role>")[2]
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", talk, re.DOTALL)
    thought = "" if prompt.endswith("</think>") else f"{THOUGHT}</think>"
    if results:
        return f"{thought}{BEHIND}{'; '.join(results)}."
    return thought + "\n".join(map(written, CALLS))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with scripted(tmp_path_factory.mktemp("scripted"), script) as (engine, runner), listening(engine) as url:
        yield url, runner


class get_weather(BaseModel):
    """The weather of the next days."""

    city: str
    days: int


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def results_of(calls: Any) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": call.id, "content": weather(**json.loads(call.function.arguments))}
        for call in calls
    ]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_openais_client_calls_tools_and_gets_an_answer(served, client, streams):
    """With the client's helpers, which parse arguments by the schema, and which add up deltas themselves."""
    tools = [openai.pydantic_function_tool(get_weather)]
    messages: list[Any] = [{"role": "user", "content": ASKED}]

    def ask() -> Any:
        if not streams:
            return client.chat.completions.parse(model=MODEL, messages=messages, tools=tools).choices[0]
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
            events = list(stream)
            ended = [each for each in events if each.type == "tool_calls.function.arguments.done"]
            choice = stream.get_final_completion().choices[0]
            assert [each.arguments for each in ended] == [
                call.function.arguments for call in choice.message.tool_calls or []
            ]
            said = "".join(each.delta for each in events if each.type == "content.delta")
            assert said == (choice.message.content or "")
            return choice

    first = ask()
    assert first.finish_reason == "tool_calls"
    calls = first.message.tool_calls
    assert [call.function.parsed_arguments for call in calls] == [get_weather(**call) for call in CALLS]
    assert first.message.reasoning_content == THOUGHT
    messages += [first.message.model_dump(exclude_none=True), *results_of(calls)]
    last = ask()
    assert (last.finish_reason, last.message.content) == ("stop", ANSWER)
    # The next prompt has the whole first turn as the model wrote it, including its thought.
    assert f"<think>{THOUGHT}</think>{''.join(map(written, CALLS))}<|role_end|>" in served[1].prompts[-1]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_openais_client_calls_tools_through_responses(served, client, streams):
    tools = [openai.pydantic_function_tool(get_weather)["function"] | {"type": "function"}]
    asked: list[Any] = [{"role": "user", "content": ASKED}]

    def ask() -> Any:
        if not streams:
            return client.responses.create(model=MODEL, input=asked, tools=tools, store=False)
        with client.responses.stream(model=MODEL, input=asked, tools=tools, store=False) as stream:
            done = [each.arguments for each in stream if each.type == "response.function_call_arguments.done"]
            final = stream.get_final_response()
            assert done == [item.arguments for item in final.output if item.type == "function_call"]
            return final

    first = ask()
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(item.arguments) for item in calls] == CALLS
    asked += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
    for item in calls:
        result = weather(**json.loads(item.arguments))
        asked.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
    assert ask().output_text == ANSWER
    assert f"<think>{THOUGHT}</think>{''.join(map(written, CALLS))}<|role_end|>" in served[1].prompts[-1]


def test_openais_client_switches_thoughts_off(client):
    for more in ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, {"reasoning_effort": "none"}):
        found = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": ASKED}],
            tools=[openai.pydantic_function_tool(get_weather)],
            **more,
        )
        message = found.choices[0].message
        assert getattr(message, "reasoning_content", None) is None
        assert [json.loads(call.function.arguments) for call in message.tool_calls] == CALLS


@pytest.fixture
def quiet():
    """Ignores warnings of the clients' own packages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
        gc.collect()  # inspect-ai leaves streams open, which warn when they are collected


@pytest.mark.extras
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("openai-api/ling3/scripted", {"stream": False}),
        ("openai-api/ling3/scripted", {"stream": True}),
        ("openai/scripted", {"responses_api": False}),
        ("openai/scripted", {"responses_api": True}),
    ],
)
def test_inspect_runs_a_task_with_tools(served, tmp_path: Path, name, how):
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import exact
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool(name="get_weather")
    def getting():
        async def execute(city: str, days: int) -> str:
            """The weather of the next days.

            Args:
                city: Where.
                days: How many.
            """
            return weather(city, days)

        return execute

    model = get_model(name, base_url=f"{served[0]}/v1", api_key="none", **how)
    task = Task(
        dataset=[Sample(input=ASKED, target=ANSWER)],
        solver=[use_tools(getting()), generate()],
        scorer=exact(),
        config=GenerateConfig(max_tokens=2000),
    )
    (log,) = eval(task, model=model, display="none", log_dir=str(tmp_path), log_format="json")
    assert log.status == "success", log.error
    (sample,) = log.samples
    assert (sample.output.completion, sample.scores["exact"].value) == (ANSWER, "C")
    made = [call.arguments for message in sample.messages for call in getattr(message, "tool_calls", None) or []]
    assert made == CALLS
