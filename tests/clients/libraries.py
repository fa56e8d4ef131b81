#!/usr/bin/env python3
"""Drives a running router with libraries that people build on: LangChain, LiteLLM, Instructor, the OpenAI Agents SDK.

    libraries.py --base-url http://127.0.0.1:8000/v1 --model qwen

None of them is told anything but an address, a key and a name. The model must know tools.
"""

import argparse
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "e2e"))
os.environ.setdefault("OPENAI_API_KEY", "none")
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

from checks import Checks, equal  # noqa: E402
from pydantic import BaseModel  # noqa: E402

check = Checks()
QUESTION = "What is the capital of France? Answer in one word."


class City(BaseModel):
    name: str
    country: str


def langchain(args, **settings):
    from langchain_openai import ChatOpenAI
    return ChatOpenAI(base_url=args.base_url, api_key="none", model=args.model, temperature=0, max_tokens=60, **settings)


@check
def langchain_chat(args):
    """LangChain: whole, streamed, and with usage"""
    llm = langchain(args, stream_usage=True)
    whole = llm.invoke(QUESTION)
    assert "Paris" in whole.content, whole
    assert whole.usage_metadata["total_tokens"] > 0
    equal("".join(chunk.content for chunk in llm.stream(QUESTION)), whole.content)


@check
def langchain_responses(args):
    """LangChain over /v1/responses"""
    answer = langchain(args, use_responses_api=True).invoke(QUESTION)
    assert "Paris" in answer.text, answer


@check
def langchain_forms(args):
    """LangChain: a forced call, its result, and a structured answer"""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"It rains in {city}."

    llm = langchain(args)
    messages = [HumanMessage("What is the weather in Paris?")]
    call = llm.bind_tools([weather], tool_choice="weather").invoke(messages)
    equal([c["name"] for c in call.tool_calls], ["weather"])
    messages += [call, ToolMessage(weather.invoke(call.tool_calls[0]["args"]), tool_call_id=call.tool_calls[0]["id"])]
    assert llm.bind_tools([weather]).invoke(messages).content
    city = llm.with_structured_output(City, method="json_schema").invoke("Name a city in France.")
    assert city.name and city.country


@check
def litellm_calls(args):
    """LiteLLM: chat, stream, completion, responses"""
    import litellm
    common = {"model": f"openai/{args.model}", "api_base": args.base_url, "api_key": "none", "temperature": 0}
    messages = [{"role": "user", "content": QUESTION}]
    whole = litellm.completion(messages=messages, max_tokens=20, **common).choices[0].message.content
    assert "Paris" in whole, whole
    chunks = litellm.completion(messages=messages, max_tokens=20, stream=True, **common)
    equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), whole)
    text = litellm.text_completion(
        model=f"text-completion-openai/{args.model}", api_base=args.base_url, api_key="none", prompt="The capital of France is", max_tokens=4)
    assert text.choices[0].text
    response = litellm.responses(input=QUESTION, max_output_tokens=20, **common)
    assert any(part.text for item in response.output if item.type == "message" for part in item.content)


@check
def instructor_models(args):
    """Instructor: pydantic models by a schema and by a call"""
    import instructor
    from openai import OpenAI
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        client = instructor.from_openai(OpenAI(base_url=args.base_url, api_key="none"), mode=mode)
        city = client.chat.completions.create(
            model=args.model, response_model=City, temperature=0, max_tokens=60, max_retries=0,
            messages=[{"role": "user", "content": "Paris is the capital of France. Give its name and its country."}])
        assert isinstance(city, City) and city.name, (mode, city)


@check
def agents(args):
    """the Agents SDK calls a function, over both APIs"""
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
    from openai import AsyncOpenAI
    asked = []

    @function_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return "rain"

    client = AsyncOpenAI(base_url=args.base_url, api_key="none")
    for api in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        asked.clear()
        agent = Agent(
            name="Forecaster", instructions="Use the tool, then say what it said.", tools=[weather],
            model=api(model=args.model, openai_client=client),
            model_settings=ModelSettings(tool_choice="required", temperature=0, max_tokens=60))
        result = Runner.run_sync(agent, "What is the weather in Paris?", max_turns=4)
        assert asked and result.final_output, (api, asked, result)


@check
def document(args):
    """the API's document is JSON, and names the version"""
    import urllib.request
    with urllib.request.urlopen(args.base_url.removesuffix("/v1") + "/openapi.json") as answer:
        equal(json.load(answer)["openapi"], "3.1.0")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--base-url", required=True)
    arguments.add_argument("--model", required=True)
    arguments.add_argument("--only", help="only checks with this in their name")
    parsed = arguments.parse_args()
    check.run(parsed, only=parsed.only)
