"""Checks of structured output and tool calls; `openai_client.py` runs them with its own."""

import json
import re
from typing import Annotated, Literal

from openai import BadRequestError
from pydantic import BaseModel, Field

from checks import equal
from openai_calls import MESSAGES, check, refused


class Paint(BaseModel):
    """What the structured answers below look like; short, so that every model comes to its end."""
    colour: Literal["red", "green", "blue"]
    coats: Annotated[int, Field(ge=1, le=9)]


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 5}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
LONG = {"max_tokens": 200}


def is_paint(text):
    Paint.model_validate_json(text)


@check
def json_schema(s):
    """response_format json_schema: every choice is valid, whole, parsed and streamed, and the same for the same seed"""
    schema = {"name": "paint", "strict": True, "schema": Paint.model_json_schema()}
    fields = {"response_format": {"type": "json_schema", "json_schema": schema}, "n": 2, "temperature": 1.0, "top_p": 1.0, "seed": 3, **LONG}
    whole = s.chat(**fields).choices
    equal([c.finish_reason for c in whole], ["stop", "stop"])
    for choice in whole:
        is_paint(choice.message.content)
    texts = ["", ""]
    for chunk in s.chat(stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    equal(texts, [c.message.content for c in whole])
    parsed = s.client.chat.completions.parse(model=s.model, messages=MESSAGES, response_format=Paint, temperature=0, **LONG)
    assert isinstance(parsed.choices[0].message.parsed, Paint), parsed


@check
def json_object(s):
    """response_format json_object, cut by max_tokens or complete, begins an object"""
    choice = s.chat(response_format={"type": "json_object"}, **LONG).choices[0]
    assert choice.message.content.startswith("{"), choice.message.content
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    equal(s.chat(response_format={"type": "text"}).choices[0].message.content, s.chat().choices[0].message.content)


@check
def guided(s):
    """guided_choice, _regex, _json and _grammar, in chats and in completions"""
    body = lambda **fields: {"extra_body": fields, **LONG}
    choices = ["red", "green and blue"]
    assert s.complete(**body(guided_choice=choices)).choices[0].text in choices
    text = s.chat(temperature=1.0, **body(guided_regex="[0-9]{3}-[a-f]{2}")).choices[0].message.content
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", text), text
    is_paint(s.complete(**body(guided_json=Paint.model_json_schema())).choices[0].text)
    grammar = 'start: "I like " COLOUR\nCOLOUR: "red" | "green"'
    assert s.complete(**body(guided_grammar=grammar)).choices[0].text in ("I like red", "I like green")


@check
def bad_structures(s):
    """a constraint that cannot work is a BadRequestError that names its field"""
    cases = [
        ("response_format.json_schema.schema",
         {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}}),
        ("response_format.json_schema.name", {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}),
        ("response_format.type", {"response_format": {"type": "yaml"}}),
        ("guided_regex", {"extra_body": {"guided_regex": "a("}}),
        ("guided_grammar", {"extra_body": {"guided_grammar": "start: nothing"}}),
        ("guided_choice", {"extra_body": {"guided_choice": []}}),
        ("guided_json", {"extra_body": {"guided_regex": "a", "guided_json": {}}}),
        ("ignore_eos", {"extra_body": {"guided_regex": "a", "ignore_eos": True}}),
    ]
    for field, fields in cases:
        refused(s.chat, BadRequestError, field, **fields)


def is_weather(call):
    equal((call.type, call.function.name), ("function", "get_weather"))
    arguments = json.loads(call.function.arguments)
    equal(sorted(arguments), ["city", "days"])
    assert arguments["city"] in ("Paris", "Rome") and 1 <= arguments["days"] <= 5, arguments


@check
def forced_call(s):
    """a call that tool_choice asks for is made, its arguments are valid, whole and streamed"""
    named = {"type": "function", "function": {"name": "get_weather"}}
    fields = {"tools": [WEATHER, CLOCK], "tool_choice": named, "temperature": 1.0, "seed": 5, **LONG}
    (choice,) = s.chat(**fields).choices
    equal((choice.finish_reason, choice.message.content), ("tool_calls", None))
    (call,) = choice.message.tool_calls
    is_weather(call)
    chunks = list(s.chat(stream=True, **fields))
    (delta,) = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
    equal((delta.index, delta.function.name, delta.function.arguments), (0, call.function.name, call.function.arguments))
    equal(chunks[-1].choices[0].finish_reason, "tool_calls")
    equal("".join(c.choices[0].delta.content or "" for c in chunks), "")


@check
def required_call(s):
    """tool_choice required: some tool is called; parallel_tool_calls false: one"""
    for seed in range(3):
        fields = {"tools": [WEATHER, CLOCK], "tool_choice": "required", "temperature": 1.0, "seed": seed, "max_tokens": 300}
        (choice,) = s.chat(parallel_tool_calls=False, **fields).choices
        (call,) = choice.message.tool_calls
        equal(choice.finish_reason, "tool_calls")
        if call.function.name == "get_weather":
            is_weather(call)
        else:
            equal((call.function.name, json.loads(call.function.arguments)), ("get_time", {}))


@check
def a_call_and_its_result(s):
    """a conversation with a call and its result is answered"""
    (choice,) = s.chat(tools=[CLOCK], tool_choice="required", parallel_tool_calls=False, **LONG).choices
    (call,) = choice.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "12:30"}
    answer = s.chat([*MESSAGES, choice.message, result])
    assert answer.usage.prompt_tokens > s.chat().usage.prompt_tokens
    assert isinstance(answer.choices[0].message.content, str)


@check
def offered_tools(s):
    """tools that may be called are taken, or refused by name when the model's template knows none"""
    try:
        choice = s.chat(tools=[WEATHER]).choices[0]
    except BadRequestError as e:
        assert "tools" in e.message and e.param == "tools", e.message
    else:
        assert choice.message.tool_calls or isinstance(choice.message.content, str)
    s.chat(tools=[WEATHER], tool_choice="none")
    for field, fields in [
        ("tool_choice", {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "no spaces"}}]}),
        ("tools", {"tools": [{**CLOCK, "function": {"name": "f", "parameters": {"type": "strin"}}}],
                   "tool_choice": "required"}),
    ]:
        refused(s.chat, BadRequestError, field, **fields)
