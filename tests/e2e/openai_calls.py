"""What the checks with the official OpenAI client share: the calls with their defaults, and the list of checks."""

from openai import OpenAI

from checks import Checks

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


def refused(call, error, word, **fields):
    """A call that must be refused with this class of error, an error object, and a message with this word."""
    try:
        call(**fields)
    except error as e:
        assert word in e.message, f"{word!r} is not in {e.message!r}"
        assert e.body and e.body.get("message") and e.body.get("type"), f"no error object: {e.body!r}"
        return e
    raise AssertionError(f"{fields} was not refused")
