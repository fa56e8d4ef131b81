#!/usr/bin/env python3
"""A chat over the OpenAI-compatible API, with the official client: text as it comes, then what it cost.

    baton up
    pip install -r examples/requirements.txt
    python3 examples/openai_chat.py "Why is the sky blue?"
"""
import argparse

import openai

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompt", nargs="?", default="Why is the sky blue?")
parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
parser.add_argument("--model", help="default: the first one served")
parser.add_argument("--max-tokens", type=int, default=128)
options = parser.parse_args()

# Baton asks for no key; the client wants one.
client = openai.OpenAI(base_url=options.base_url, api_key="none")
model = options.model or client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": options.prompt}],
    max_tokens=options.max_tokens,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    # The last chunk has the usage and no choice.
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n[{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out]")
