#!/usr/bin/env python3
"""Drives a running router over gRPC, knowing nothing of it but what server reflection tells.

    python3 -m venv venv && venv/bin/pip install -r tests/e2e/requirements.txt
    venv/bin/python tests/e2e/grpc_client.py --target 127.0.0.1:8001 --model smollm2
"""

import argparse
from types import SimpleNamespace

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from checks import Checks, equal

check = Checks()
SERVICE = "baton.v1.Inference"
STOP, LENGTH = 1, 2
PROMPT = "The capital of France is"


class Server:
    """A channel, and stubs built from the descriptors the server hands out."""

    def __init__(self, target, model):
        self.channel = grpc.insecure_channel(target)
        grpc.channel_ready_future(self.channel).result(timeout=30)
        self.model = model
        self.reflection = ProtoReflectionDescriptorDatabase(self.channel)
        self.pool = DescriptorPool(self.reflection)
        self.service = self.pool.FindServiceByName(SERVICE)
        self.messages = {n: self._class(f"baton.v1.{n}") for n in ("GenerateRequest", "ListModelsRequest")}

    def _class(self, name):
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(name))

    def call(self, method, request, **options):
        """A unary or streaming call of a method, by its descriptor."""
        description = self.service.methods_by_name[method]
        make = self.channel.unary_stream if description.server_streaming else self.channel.unary_unary
        answer = message_factory.GetMessageClass(description.output_type)
        stub = make(f"/{SERVICE}/{method}", type(request).SerializeToString, answer.FromString)
        return stub(request, timeout=120, **options)

    def request(self, **fields):
        """A greedy request; `sampling` overrides single fields."""
        sampling = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **fields.pop("sampling", {})}
        if not fields.keys() & {"text", "token_ids", "chat"}:
            fields["text"] = PROMPT
        return self.messages["GenerateRequest"](model=fields.pop("model", self.model), sampling=sampling, **fields)

    def generate(self, **fields):
        """A whole answer: tokens, text, finish. Checks the numbering (I4) and that `finish` comes once, at the end."""
        tokens, text, responses = [], "", list(self.call("Generate", self.request(**fields)))
        for response in responses:
            if response.tokens:
                equal(response.index, len(tokens), "index of the first token")
            tokens += response.tokens
            text += response.text
        equal([t.index for t in tokens], list(range(len(tokens))), "numbering")
        equal([r.HasField("finish") for r in responses], [False] * (len(responses) - 1) + [True], "finish")
        finish = responses[-1].finish
        equal(finish.usage.completion_tokens, len(tokens))
        return SimpleNamespace(ids=[t.id for t in tokens], tokens=tokens, text=text, finish=finish)


@check
def reflection(s):
    """services are listed by reflection"""
    services = set(s.reflection.get_services())
    assert {SERVICE, "grpc.health.v1.Health"} <= services, services


@check
def health(s):
    """health is SERVING, overall and for the service; an unknown service is NOT_FOUND"""
    stub = health_pb2_grpc.HealthStub(s.channel)
    for service in ("", SERVICE):
        equal(stub.Check(health_pb2.HealthCheckRequest(service=service)).status, health_pb2.HealthCheckResponse.SERVING, service)
    refused(grpc.StatusCode.NOT_FOUND, lambda: stub.Check(health_pb2.HealthCheckRequest(service="no.such.Service")))


@check
def list_models(s):
    """the model is listed with its sizes"""
    models = {m.id: m for m in s.call("ListModels", s.messages["ListModelsRequest"]()).models}
    assert s.model in models, list(models)
    assert models[s.model].context_tokens > 0 and models[s.model].vocab_size > 0


@check
def text(s):
    """text in, numbered tokens and text out, twice the same"""
    answer = s.generate()
    equal((len(answer.ids), answer.finish.reason), (16, LENGTH))
    assert answer.finish.usage.prompt_tokens > 0
    again = s.generate()
    equal((again.ids, again.text), (answer.ids, answer.text))
    assert not answer.tokens[0].HasField("logprob") and not answer.tokens[0].top, "unasked logprobs"


@check
def token_ids(s):
    """token ids in: going on from an answer gives the rest of a longer one"""
    ids = [10, 20, 30, 40, 50]
    whole = s.generate(token_ids={"ids": ids})
    equal(whole.finish.usage.prompt_tokens, len(ids))
    rest = s.generate(token_ids={"ids": ids + whole.ids[:6]}, sampling={"max_tokens": 10})
    equal(rest.ids, whole.ids[6:])


@check
def no_model_name(s):
    """an empty model name means the only model"""
    equal(s.generate(model="").ids, s.generate().ids)


@check
def chat(s):
    """messages are rendered with the model's template"""
    messages = {"messages": [{"role": "user", "content": "Name three colours."}]}
    answer = s.generate(chat=messages)
    equal(len(answer.ids), 16)
    equal(s.generate(chat=messages).ids, answer.ids)


@check
def logprobs(s):
    """logprobs: the chosen token leads when greedy"""
    for token in s.generate(sampling={"top_logprobs": 3}).tokens:
        equal(len(token.top), 3)
        equal(token.top[0].id, token.id)
        assert token.logprob <= 0 and abs(token.logprob - token.top[0].logprob) < 1e-6
        assert token.top[0].logprob >= token.top[1].logprob >= token.top[2].logprob
    chosen = s.generate(sampling={"top_logprobs": 0}).tokens[0]
    assert chosen.HasField("logprob") and not chosen.top


@check
def seeds(s):
    """the same seed gives the same answer, another one another"""
    sample = lambda seed: s.generate(sampling={"temperature": 1.0, "seed": seed, "max_tokens": 32}).ids
    first = sample(7)
    equal(sample(7), first)
    assert sample(8) != first


@check
def stop_token(s):
    """a stop token id ends the answer"""
    ids = s.generate().ids
    answer = s.generate(sampling={"stop_token_ids": [ids[3]]})
    equal(answer.finish.reason, STOP)
    at = ids.index(ids[3])
    assert answer.ids in (ids[:at], ids[: at + 1]), (answer.ids, ids)


@check
def cancelled(s):
    """a cancelled call disturbs nobody"""
    want = s.generate().ids
    for _ in range(4):
        call = s.call("Generate", s.request(sampling={"max_tokens": 200}))
        next(iter(call))
        call.cancel()
    equal(s.generate().ids, want)


def refused(code, call, word=""):
    """The call must end with this status and a message with this word."""
    try:
        call()
    except grpc.RpcError as e:
        equal(e.code(), code, e.details())
        assert word in e.details(), f"{word!r} is not in {e.details()!r}"
        return
    raise AssertionError(f"not refused with {code}")


@check
def bad_requests(s):
    """bad input gets a status and a message that names the field, and the next request works"""
    argument = grpc.StatusCode.INVALID_ARGUMENT
    refused(grpc.StatusCode.NOT_FOUND, lambda: s.generate(model="no-such-model"), "no-such-model")
    refused(argument, lambda: s.generate(sampling={"temperature": -1.0}), "temperature")
    refused(argument, lambda: s.generate(sampling={"top_p": 1.5}), "top_p")
    refused(argument, lambda: s.generate(sampling={"max_tokens": 0}), "max_tokens")
    refused(argument, lambda: s.generate(sampling={"top_logprobs": 21}), "top_logprobs")
    refused(argument, lambda: s.generate(token_ids={"ids": [2**32 - 1]}), "token")
    refused(argument, lambda: s.generate(token_ids={"ids": []}), "prompt")
    refused(argument, lambda: s.generate(token_ids={"ids": [10] * 300_000}), "context")
    refused(argument, lambda: list(s.call("Generate", s.messages["GenerateRequest"](model=s.model))), "input")
    equal(len(s.generate().ids), 16)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:8001")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", help="run the checks whose name contains this")
    args = parser.parse_args()
    print(f"grpc {grpc.__version__} against {args.target}")
    check.run(Server(args.target, args.model), only=args.only)


if __name__ == "__main__":
    main()
