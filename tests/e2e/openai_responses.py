"""Checks of /v1/responses, and of completions that repeat their prompt, with the official OpenAI client."""

import json

from openai import BadRequestError

from checks import equal
from openai_calls import IDS, MESSAGES, check, output_ids, prompt_ids, refused

ADD = {"type": "function", "name": "add", "description": "Adds two numbers.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}


def respond(s, **fields):
    return s.client.responses.create(
        model=s.model, **{"input": MESSAGES[0]["content"], "temperature": 0, "max_output_tokens": 16, **fields})


@check
def response(s):
    """a response says what the chat says"""
    answer = respond(s)
    equal(answer.output_text, s.chat().choices[0].message.content)
    assert answer.status in ("completed", "incomplete")
    equal(answer.usage.total_tokens, answer.usage.input_tokens + answer.usage.output_tokens)


@check
def response_stream(s):
    """a streamed response: the client's own reading of the events is the whole"""
    with s.client.responses.stream(
            model=s.model, input=MESSAGES[0]["content"], temperature=0, max_output_tokens=300) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    equal(text, final.output_text)
    equal(text, respond(s, max_output_tokens=300).output_text)


@check
def response_items(s):
    """a conversation as items, with instructions; its result goes on"""
    first = respond(s, instructions="Answer in one word.")
    items = [{"role": "user", "content": MESSAGES[0]["content"]}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items.append({"role": "user", "content": [{"type": "input_text", "text": "Why?"}]})
    assert respond(s, input=items, instructions="Answer in one word.").output_text


@check
def response_call(s):
    """a forced call, and its output as an item"""
    answer = respond(s, tools=[ADD], tool_choice="required", parallel_tool_calls=False, max_output_tokens=60)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    equal((call.name, sorted(json.loads(call.arguments))), ("add", ["a", "b"]))
    items = [{"role": "user", "content": "Add."}, call.model_dump(exclude_none=True),
             {"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
    assert respond(s, input=items).output_text


@check
def response_form(s):
    """text.format forces a form"""
    form = {"type": "json_schema", "name": "age", "strict": True, "schema": {
        "type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}}
    answer = respond(s, text={"format": form}, max_output_tokens=60)
    if answer.status == "completed":
        assert isinstance(json.loads(answer.output_text)["age"], int)


@check
def response_refusals(s):
    """what needs state is refused by name"""
    refused(lambda: respond(s, previous_response_id="resp_1"), BadRequestError, "previous_response_id")
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
    refused(lambda: respond(s, input=[image]), BadRequestError, "input[0].content[0]")


@check
def echo(s):
    """log probabilities of a prompt are those that the model gave when it wrote the same tokens"""
    written = s.complete(logprobs=2, extra_body=IDS)
    prompt, answer = prompt_ids(written), output_ids(written.choices[0])
    echoed = s.complete(prompt=prompt + answer, echo=True, logprobs=2, max_tokens=0, extra_body=IDS).choices[0]
    logprobs = echoed.logprobs.token_logprobs
    equal((len(logprobs), logprobs[0], output_ids(echoed)), (len(prompt + answer), None, []))
    equal(logprobs[len(prompt):], written.choices[0].logprobs.token_logprobs)
    equal(echoed.logprobs.top_logprobs[len(prompt):], written.choices[0].logprobs.top_logprobs)
