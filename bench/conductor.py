#!/usr/bin/env python3
"""How well the router's predicted placement does on a real cluster of this machine.

    bench/conductor.py predict [--model NAME] [--requests N] [--rate R]
        One prefill and one decode worker, each on a core of its own. Requests come at random times (Poisson), with prompts of 16 to 600
        tokens of which some begin alike, and answers of 16 to 48. After N of them, N more are measured: how far the predicted time to the
        first token, and from token to token, is from what the router measured.

    bench/conductor.py hits --trace conversation_trace.jsonl [--model NAME] [--requests N] [--clients C]
        Two prefill and two decode workers. Replays a trace of conversations whose lengths are divided by 32, so that its blocks of 512 tokens
        are the workers' of 16, by C clients. Compares the prompts' tokens that were not computed with those that one cache without limit
        would have found, in the order in which the requests were sent.

target/release/baton must be built. The first of a run's cores should be idle.
"""
import argparse
import http.client
import json
import os
import pathlib
import random
import statistics
import subprocess
import threading
import time

from cluster import Cluster

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCALE = 32
BLOCK = 16


def start(model, prefill, decode, *flags):
    flags = ["--threads", "1", "--prefill", str(prefill), "--decode", str(decode), *flags]
    return Cluster(ROOT / "target/release/baton", model, flags)


def pin(cluster):
    """Each worker to a core of its own; all else stays where it is."""
    children = subprocess.run(["pgrep", "-P", str(cluster.process.pid), "-a"], capture_output=True, text=True).stdout
    workers = [int(line.split()[0]) for line in children.splitlines() if " prefill" in line or " decode" in line]
    for core, worker in enumerate(workers):
        for task in os.listdir(f"/proc/{worker}/task"):
            os.sched_setaffinity(int(task), {core % os.cpu_count()})
    assert workers, children


def ask(cluster, prompt, tokens):
    """The tokens of the prompt that were cached, and why the request was placed where it was, with what was measured."""
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", cluster.port)
    connection.request("POST", "/v1/completions", json.dumps(body), {"x-baton-trace": "1"})
    answer = connection.getresponse()
    told = json.loads(answer.read())
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {told}")
    placements = json.loads(answer.headers["x-baton-placement"])
    connection.close()
    return told["usage"]["prompt_tokens_details"]["cached_tokens"], placements[0]


def predict(options):
    cluster = start(options.model, 1, 1)
    chance = random.Random(7)
    beginnings = [[chance.randrange(100, 10000) for _ in range(256)] for _ in range(4)]
    count = 2 * options.requests
    told = [None] * count

    def client(at, prompt, tokens):
        told[at] = ask(cluster, prompt, tokens)[1]

    try:
        pin(cluster)
        threads = []
        for at in range(count):
            length = chance.randint(16, 600)
            prompt = [chance.randrange(100, 10000) for _ in range(length)]
            if chance.random() < 0.3:
                prompt = chance.choice(beginnings) + prompt[:300]
            thread = threading.Thread(target=client, args=(at, prompt, chance.randint(16, 48)))
            thread.start()
            threads.append(thread)
            time.sleep(chance.expovariate(options.rate))
        for thread in threads:
            thread.join()
    finally:
        cluster.close()
    if None in told:
        raise SystemExit(f"{told.count(None)} of {count} requests failed; the errors are above")
    measured = told[options.requests:]
    routes = {"split": sum(bool(one["prefill"]) for one in measured), "local": sum(not one["prefill"] for one in measured)}
    print(f"{options.model}, {options.requests} requests after {options.requests}, {options.rate} a second; {routes}")
    for field, meaning in (("first_token_s", "time to the first token"), ("token_s", "from token to token")):
        for route, of in (("all", measured), ("split", [one for one in measured if one["prefill"]]), ("local", [one for one in measured if not one["prefill"]])):
            pairs = [(one["predicted"][field], one["measured"][field]) for one in of if one["measured"][field]]
            if len(pairs) < 2:
                continue
            low, error, high = statistics.quantiles([abs(a - b) / b for a, b in pairs], n=4)
            ratio, at = statistics.median(a / b for a, b in pairs), statistics.median(b for _, b in pairs)
            print(f"  {meaning}, {route}: median {at * 1e3:.1f} ms; error: median {error:.1%}, quarters {low:.1%} and {high:.1%}; "
                  f"predicted / measured: median {ratio:.2f}")


def oracle(requests):
    """The tokens that one cache without limit finds: for each request the longest beginning that it shares with an earlier one."""
    known, hits = set(), 0
    for _, _, names in requests:
        path, found, going = (), 0, True
        for name in names:
            path = hash((path, name))
            going = going and path in known
            found += going
            known.add(path)
        hits += min(found * BLOCK, len(names) * BLOCK - 1)
    return hits


def hits(options):
    requests = []
    for line in pathlib.Path(options.trace).read_text().splitlines()[: options.requests]:
        told = json.loads(line)
        # Whole blocks only: a block that is partly full is found by none of the next prompts.
        names = told["hash_ids"][: max(told["input_length"] // (SCALE * BLOCK), 1)]
        requests.append((told["timestamp"], max(told["output_length"] // SCALE, 1), names))
    cluster = start(options.model, 2, 2, "--kv-memory", options.kv_memory)
    lock, next_one, found, computed, failed = threading.Lock(), iter(requests), [0], [0], []

    def client():
        while True:
            with lock:
                request = next(next_one, None)
            if request is None:
                return
            _, output, names = request
            prompt = [1 + hash((name, place)) % 600 for name in names for place in range(BLOCK)]
            try:
                cached, _ = ask(cluster, prompt, output)
            except (OSError, RuntimeError) as error:
                failed.append(error)
                return
            with lock:
                found[0] += cached
                computed[0] += len(prompt)

    try:
        threads = [threading.Thread(target=client) for _ in range(options.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        cluster.close()
    if failed:
        raise failed[0]
    best = oracle(requests)
    print(f"{options.model}, {len(requests)} requests by {options.clients} clients: {computed[0]} prompt tokens, {found[0]} found cached, "
          f"{best} by an oracle: {found[0] / best:.3f} of them")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["predict", "hits"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--trace")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--kv-memory", default="2GiB")
    options = parser.parse_args()
    if options.what == "hits" and not options.trace:
        parser.error("hits needs --trace")
    predict(options) if options.what == "predict" else hits(options)


main()
