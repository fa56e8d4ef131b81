#!/usr/bin/env python3
"""Drives a running router with the official OpenAI client.

    python3 -m venv venv && venv/bin/pip install -r tests/e2e/requirements.txt
    venv/bin/python tests/e2e/openai_client.py --base-url http://127.0.0.1:8000/v1 --model smollm2

Works with any model, also with a random one, except that a chat needs a chat template.
"""

import argparse
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

import openai
from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel, Field

from checks import Checks, equal

check = Checks()
PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "Name three colours."}]
IDS = {"return_token_ids": True}


class Server:
    """The client, the model, and the two calls with greedy defaults."""

    def __init__(self, base_url, model):
        self.client = OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=120)
        self.model = model

    def complete(self, prompt=PROMPT, **fields):
        fields = {"model": self.model, "temperature": 0, "max_tokens": 16, **fields}
        return self.client.completions.create(prompt=prompt, **fields)

    def chat(self, messages=MESSAGES, **fields):
        fields = {"model": self.model, "temperature": 0, "max_tokens": 16, **fields}
        return self.client.chat.completions.create(messages=messages, **fields)


def prompt_ids(response):
    """Prompt token ids, whether they are given for each choice or once."""
    extra = response.choices[0].model_extra or {}
    return extra.get("prompt_token_ids") or (response.model_extra or {})["prompt_token_ids"]


def output_ids(choice):
    return choice.model_extra["token_ids"]


@check
def models(s):
    """the model is listed and can be looked up"""
    assert s.model in [m.id for m in s.client.models.list()]
    equal(s.client.models.retrieve(s.model).id, s.model)


@check
def chat(s):
    """chat, whole"""
    answer = s.chat()
    equal(answer.object, "chat.completion")
    equal(answer.model, s.model)
    (choice,) = answer.choices
    equal((choice.index, choice.message.role), (0, "assistant"))
    assert isinstance(choice.message.content, str)
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.prompt_tokens > 0 and 0 < usage.completion_tokens <= 16
    equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)


@check
def chat_stream(s):
    """chat, streamed: the same text, a role first, a reason last, no usage unless asked"""
    chunks = list(s.chat(stream=True))
    equal({c.object for c in chunks}, {"chat.completion.chunk"})
    equal(len({c.id for c in chunks}), 1, "ids of one answer")
    equal(chunks[0].choices[0].delta.role, "assistant")
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    whole = s.chat().choices[0]
    equal(text, whole.message.content)
    reasons = [c.choices[0].finish_reason for c in chunks]
    equal(reasons, [None] * (len(chunks) - 1) + [whole.finish_reason])
    assert all(c.usage is None for c in chunks)


@check
def chat_stream_usage(s):
    """stream_options.include_usage adds one chunk, without choices"""
    chunks = list(s.chat(stream=True, stream_options={"include_usage": True}))
    equal(chunks[-1].choices, [])
    assert all(c.usage is None and c.choices for c in chunks[:-1])
    usage, whole = chunks[-1].usage, s.chat().usage
    equal((usage.prompt_tokens, usage.completion_tokens), (whole.prompt_tokens, whole.completion_tokens))


@check
def chat_max_completion_tokens(s):
    """max_completion_tokens limits an answer like max_tokens"""
    answer = s.client.chat.completions.create(
        model=s.model, messages=MESSAGES, temperature=0, max_completion_tokens=3, extra_body={"ignore_eos": True})
    equal(answer.usage.completion_tokens, 3)
    equal(answer.choices[0].finish_reason, "length")


@check
def chat_content_parts(s):
    """a message's content may be a list of text parts"""
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    equal(s.chat(parts).choices[0].message.content, s.chat().choices[0].message.content)


@check
def completion(s):
    """completion, whole and streamed"""
    answer = s.complete(extra_body={"ignore_eos": True})
    equal(answer.object, "text_completion")
    (choice,) = answer.choices
    equal((choice.finish_reason, answer.usage.completion_tokens), ("length", 16))
    chunks = list(s.complete(stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}))
    equal("".join(c.choices[0].text for c in chunks[:-1]), choice.text)
    equal(chunks[-1].usage.completion_tokens, 16)


@check
def completion_token_ids(s):
    """token ids in give what the text gives, and come back when asked for"""
    by_text = s.complete(extra_body=IDS)
    ids = prompt_ids(by_text)
    equal(len(ids), by_text.usage.prompt_tokens)
    equal(len(output_ids(by_text.choices[0])), by_text.usage.completion_tokens)
    by_ids = s.complete(prompt=ids, extra_body=IDS)
    equal(prompt_ids(by_ids), ids)
    equal(output_ids(by_ids.choices[0]), output_ids(by_text.choices[0]))
    equal(by_ids.choices[0].text, by_text.choices[0].text)
    assert "token_ids" not in (s.complete().choices[0].model_extra or {}), "unasked token ids"


@check
def completion_token_ids_stream(s):
    """streamed token ids, put together, are the whole"""
    whole = output_ids(s.complete(extra_body=IDS).choices[0])
    chunks = list(s.complete(stream=True, extra_body=IDS))
    parts = [(c.choices[0].model_extra or {}).get("token_ids") or [] for c in chunks]
    equal(sum(parts, []), whole)


@check
def completion_prompts(s):
    """several prompts in one request are answered each, in order"""
    prompts = [PROMPT, "One, two, three,", PROMPT]
    answer = s.complete(prompt=prompts)
    equal([c.index for c in answer.choices], [0, 1, 2])
    equal([c.text for c in answer.choices], [s.complete(prompt=p).choices[0].text for p in prompts])


@check
def chat_logprobs(s):
    """chat logprobs: the chosen token leads when greedy; bytes spell the text"""
    choice = s.chat(logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert content
    for item in content:
        tops = [t.logprob for t in item.top_logprobs]
        equal(len(tops), 3)
        equal(tops, sorted(tops, reverse=True))
        assert item.logprob <= 0 and abs(item.logprob - tops[0]) < 1e-6
    spelled = b"".join(bytes(item.bytes or []) for item in content).decode(errors="replace")
    assert spelled.startswith(choice.message.content.rstrip("\ufffd")), (spelled, choice.message.content)
    assert s.chat(logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert s.chat().choices[0].logprobs is None


@check
def completion_logprobs(s):
    """completion logprobs: four lists of one length"""
    answer = s.complete(logprobs=2, extra_body=IDS)
    choice, logprobs = answer.choices[0], answer.choices[0].logprobs
    count = len(output_ids(choice))
    lists = [logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset]
    equal([len(x) for x in lists], [count] * 4)
    equal(logprobs.text_offset[0], 0)
    for logprob, top in zip(logprobs.token_logprobs, logprobs.top_logprobs):
        assert logprob <= 0 and 1 <= len(top) <= 2
        # Two ids may be the same text; then they share a key and one is lost.
        assert len(top) == 1 or abs(max(top.values()) - logprob) < 1e-6


@check
def several_choices(s):
    """n=2 gives two different answers, counted together, the same for the same seed"""
    fields = {"n": 2, "temperature": 1.0, "seed": 11, "max_tokens": 24, "extra_body": {**IDS, "ignore_eos": True}}
    answer = s.complete(**fields)
    equal([c.index for c in answer.choices], [0, 1])
    first, second = (output_ids(c) for c in answer.choices)
    assert first != second
    equal(answer.usage.completion_tokens, 48)
    again = s.complete(**fields)
    equal([output_ids(c) for c in again.choices], [first, second])
    streamed = {0: [], 1: []}
    for chunk in s.complete(stream=True, **fields):
        for choice in chunk.choices:
            streamed[choice.index] += (choice.model_extra or {}).get("token_ids") or []
    equal(streamed, {0: first, 1: second})


def typable(text):
    """Three printable characters after the first quarter of a text, or None; they may span tokens."""
    parts = (text[i : i + 3] for i in range(len(text) // 4, len(text) - 3))
    return next((p for p in parts if p.isprintable() and "\ufffd" not in p), None)


@check
def stop_strings(s):
    """a stop string ends the answer and is not part of it, whole or streamed"""
    # A random model may need some tries to write something that can be typed.
    for seed in range(30):
        fields = {"max_tokens": 32, "temperature": min(seed, 1), "seed": seed, "extra_body": {"ignore_eos": True}}
        text = s.complete(**fields).choices[0].text
        if stop := typable(text):
            break
    assert stop, f"no three printable characters in {text!r}"
    want = text[: text.index(stop)]
    choice = s.complete(stop=[stop], **fields).choices[0]
    equal((choice.text, choice.finish_reason), (want, "stop"))
    chunks = list(s.complete(stop=[stop], stream=True, **fields))
    equal("".join(c.choices[0].text for c in chunks), want)
    equal(chunks[-1].choices[0].finish_reason, "stop")


@check
def stop_token_ids(s):
    """a stop token id ends the answer"""
    body = {**IDS, "ignore_eos": True}
    ids = output_ids(s.complete(max_tokens=24, extra_body=body).choices[0])
    # Some later token, or the first when the answer is all the same.
    at = ids.index(ids[len(ids) // 2])
    choice = s.complete(max_tokens=24, extra_body={**body, "stop_token_ids": [ids[at]]}).choices[0]
    equal(choice.finish_reason, "stop")
    assert output_ids(choice) in (ids[:at], ids[: at + 1]), (output_ids(choice), ids)


@check
def seeds(s):
    """the same seed gives the same answer, another one another"""
    def sample(seed):
        fields = {"temperature": 1.0, "seed": seed, "max_tokens": 32, "extra_body": {**IDS, "ignore_eos": True}}
        return output_ids(s.complete(**fields).choices[0])
    first = sample(7)
    equal(sample(7), first)
    assert sample(8) != first


@check
def logit_bias(s):
    """a bias of 100 forces a token"""
    token = output_ids(s.complete(max_tokens=2, extra_body={**IDS, "ignore_eos": True}).choices[0])[1]
    forced = s.complete(max_tokens=4, logit_bias={str(token): 100}, extra_body={**IDS, "ignore_eos": True})
    equal(output_ids(forced.choices[0]), [token] * 4)


@check
def same_alone_or_together(s):
    """I1: eight requests at once give what each gives alone"""
    prompts = [f"{PROMPT} number {i}, and {'so ' * i}" for i in range(8)]
    run = lambda p: output_ids(s.complete(prompt=p, extra_body={**IDS, "ignore_eos": True}).choices[0])
    alone = [run(p) for p in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        equal(list(pool.map(run, prompts)), alone)


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
    fields = {"response_format": {"type": "json_schema", "json_schema": schema}, "n": 2, "temperature": 1.0, "seed": 3, **LONG}
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


@check
def broken_off(s):
    """a client that leaves mid-stream disturbs nobody"""
    want = s.complete().choices[0].text
    for _ in range(4):
        stream = s.complete(max_tokens=200, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    equal(s.complete().choices[0].text, want)


def refused(call, error, word, **fields):
    """A call that must be refused with this class of error, an error object, and a message with this word."""
    try:
        call(**fields)
    except error as e:
        assert word in e.message, f"{word!r} is not in {e.message!r}"
        assert e.body and e.body.get("message") and e.body.get("type"), f"no error object: {e.body!r}"
        return e
    raise AssertionError(f"{fields} was not refused")


@check
def unknown_model(s):
    """an unknown model is a NotFoundError that names it"""
    refused(s.complete, NotFoundError, "no-such-model", model="no-such-model")
    try:
        s.chat(model="no-such-model")
    except NotFoundError:
        return
    raise AssertionError("chat took an unknown model")


@check
def bad_fields(s):
    """each bad field is a BadRequestError that names it"""
    cases = [
        ("temperature", {"temperature": -1}),
        ("temperature", {"temperature": "hot"}),
        ("top_p", {"top_p": 1.5}),
        ("max_tokens", {"max_tokens": 0}),
        ("presence_penalty", {"presence_penalty": 3}),
        ("n", {"n": 0}),
        ("logprobs", {"logprobs": 100}),
        ("logit_bias", {"logit_bias": {"1": 1000}}),
        ("stop", {"stop": [""]}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [2**31]}),
        ("min_p", {"extra_body": {"min_p": 2}}),
    ]
    for field, fields in cases:
        error = refused(s.complete, BadRequestError, field, **fields)
        equal(error.type, "invalid_request_error", field)
    s.complete()


@check
def bad_chats(s):
    """chats without messages, or of an unknown shape, are BadRequestErrors"""
    for messages in ([], [{"role": "user"}], "hello"):
        try:
            s.chat(messages)
        except BadRequestError as e:
            assert "message" in e.message or "content" in e.message, e.message
        else:
            raise AssertionError(f"{messages} was not refused")


@check
def too_long(s):
    """a prompt longer than the context is refused with a stable code, and the next request works"""
    error = refused(s.complete, BadRequestError, "context", prompt="word " * 200_000)
    equal(error.code, "context_length_exceeded")
    equal(s.complete(max_tokens=1).usage.completion_tokens, 1)


@check
def no_such_path(s):
    """an unknown path is a NotFoundError with an error object"""
    try:
        s.client.embeddings.create(model=s.model, input="text")
    except NotFoundError as e:
        assert e.body and e.body.get("message"), f"no error object: {e.body!r}"
    else:
        raise AssertionError("embeddings are not served")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", help="run the checks whose name contains this")
    args = parser.parse_args()
    print(f"openai {openai.__version__} against {args.base_url}")
    check.run(Server(args.base_url, args.model), only=args.only)


if __name__ == "__main__":
    main()
