#!/usr/bin/env python3
"""A chat over gRPC, from the .proto files: numbered tokens, text, and the reason why it ended.

    baton up
    pip install -r examples/requirements.txt
    python3 examples/grpc_generate.py "Why is the sky blue?"

The stubs are made of proto/baton/v1/inference.proto at the start. In a program of your own, make them once:
python3 -m grpc_tools.protoc -I proto --python_out=. --grpc_python_out=. proto/baton/v1/inference.proto
"""
import argparse
import pathlib
import sys

import grpc

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "proto"))
messages, services = grpc.protos_and_services("baton/v1/inference.proto")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompt", nargs="?", default="Why is the sky blue?")
parser.add_argument("--target", default="127.0.0.1:8001")
parser.add_argument("--max-tokens", type=int, default=128)
options = parser.parse_args()

request = messages.GenerateRequest(
    chat=messages.Chat(messages=[messages.ChatMessage(role="user", content=options.prompt)]),
    sampling=messages.Sampling(max_tokens=options.max_tokens, seed=1),
)
with grpc.insecure_channel(options.target) as channel:
    tokens = 0
    # A deadline travels with the request; breaking the loop cancels it on the workers.
    for part in services.InferenceStub(channel).Generate(request, timeout=120):
        assert not part.tokens or part.index == tokens, "every token comes once, in order"
        tokens += len(part.tokens)
        print(part.text, end="", flush=True)
        if part.HasField("finish"):
            reason = messages.FinishReason.Name(part.finish.reason)
            print(f"\n[{part.finish.usage.prompt_tokens} tokens in, {tokens} out, {reason}]")
