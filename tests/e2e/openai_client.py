#!/usr/bin/env python3
"""Drives a running router with the official OpenAI client.

    python3 -m venv venv && venv/bin/pip install -r tests/e2e/requirements.txt
    venv/bin/python tests/e2e/openai_client.py --base-url http://127.0.0.1:8000/v1 --model smollm2

Works with any model, also with a random one, except that a chat needs a chat template.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor

import openai
from openai import BadRequestError, NotFoundError

import openai_responses  # adds its checks
import openai_structured  # adds its checks
from checks import equal
from openai_calls import IDS, MESSAGES, PROMPT, Server, check, output_ids, prompt_ids, refused


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


@check
def broken_off(s):
    """a client that leaves mid-stream disturbs nobody"""
    want = s.complete().choices[0].text
    for _ in range(4):
        stream = s.complete(max_tokens=200, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    equal(s.complete().choices[0].text, want)


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
