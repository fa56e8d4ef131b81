#!/usr/bin/env python3
"""Serving under load: Baton split, Baton aggregated and llama.cpp's server on the same cores, one after the other, on one trace.

    bench/serving.py --baton target/release/baton --llama llama-server --model model.gguf --rates 0.5 --requests 40 --rounds 3

Split, every prompt is computed by the prefill worker; conditional is how Baton is shipped: the router has a short one computed by the decode
worker, where it is answered sooner that way.

A trace is drawn from a seed: Poisson arrivals, a part of the prompts long, so that they arrive among running streams. It is sent open-loop:
a request goes out when it is due, however late the answers are, and its time to first token counts from then. Every way gets the same
trace, the same number of sequences at a time, the same context and the same tokens a step. Every answer has exactly the tokens asked for.
"""

import argparse
import asyncio
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import time
import typing

from cluster import Cluster, free_ports, random_ids
from compare import print_table, wait_until_idle


class LlamaServer:
    """llama.cpp's server, until closed; the same interface as `Cluster`."""

    def __init__(self, program, model, threads, sequences, context):
        (self.port,) = free_ports(1)
        threads = str(threads)
        # A part of the cache for each sequence, as Baton's engine reserves: in a shared one each would mask the others'.
        command = [program, "--model", model, "--host", "127.0.0.1", "--port", str(self.port), "--threads", threads, "--threads-batch", threads,
                   "--parallel", str(sequences), "--ctx-size", str(sequences * context), "--no-kv-unified", "--batch-size", "512",
                   "--ubatch-size", "512", "--cache-ram", "0", "--log-disable"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not self.ready():
            if self.process.poll() is not None:
                raise SystemExit(f"llama.cpp's server did not start: {' '.join(map(str, command))}")
            time.sleep(0.1)

    def ready(self):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def completion(self, ids, max_tokens):
        return "/completion", {"prompt": ids, "n_predict": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True,
                               "cache_prompt": False, "return_tokens": True}

    @staticmethod
    def tokens(event, before):
        # A token that ends within a character gets no event of its own; the last event says how many there were.
        return event["tokens_predicted"] - before if event.get("stop") else len(event.get("tokens") or [])

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def trace(args, seed):
    """[(seconds after the start, prompt tokens, answer tokens)]"""
    draw, at, requests = random.Random(seed), 0.0, []
    for _ in range(args.requests):
        at += draw.expovariate(args.rate)
        long = draw.random() < args.long_share
        low, high = args.long_prompt if long else args.short_prompt
        requests.append((at, draw.randint(low, high), draw.randint(*args.answer)))
    return requests


async def stream(server, ids, max_tokens):
    """Times at which the answer's tokens came."""
    path, body = server.completion(ids, max_tokens)
    body = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    writer.write((head + "connection: close\r\n\r\n").encode() + body)
    times = []
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"{path}: {status.decode().strip()} {(await reader.read(2000)).decode()}")
    while line := await reader.readline():
        # Chunk sizes and the blank lines between events are not looked at: each event is one line.
        if line.startswith(b"data: {"):
            now = time.monotonic()
            times += [now] * server.tokens(json.loads(line[6:]), len(times))
    writer.close()
    if len(times) != max_tokens:
        raise SystemExit(f"{path}: {len(times)} tokens came, {max_tokens} were asked for")
    return times


async def replay(server, requests, salt):
    """[(seconds to the first token, gaps between tokens)] and the seconds until the last token of all."""
    start = time.monotonic() + 0.2
    async def one(number, at, prompt, answer):
        due = start + at
        await asyncio.sleep(due - time.monotonic())
        times = await stream(server, random_ids(prompt, salt * 10_000 + number), answer)
        return times[0] - due, [b - a for a, b in zip(times, times[1:])], times[-1]
    answers = await asyncio.gather(*(one(n, *request) for n, request in enumerate(requests)))
    return [(first, gaps) for first, gaps, _ in answers], max(last for *_, last in answers) - start


def percentile(values, p):
    values = sorted(values)
    return values[min(len(values) - 1, int(p / 100 * len(values)))]


def figures(args, requests, answers, seconds):
    """One run's metrics."""
    firsts = [first for first, _ in answers]
    gaps = [gap for _, gaps in answers for gap in gaps]
    result = {
        "TTFT p50, s": percentile(firsts, 50),
        "TTFT p99, s": percentile(firsts, 99),
        "ITL p50, ms": percentile(gaps, 50) * 1000,
        "ITL p99, ms": percentile(gaps, 99) * 1000,
        "ITL max, ms": max(gaps) * 1000,
        "throughput, tokens/s": sum(answer for *_, answer in requests) / seconds,
    }
    for slo in args.slos:
        good = sum(first <= slo.first and percentile(gaps, 99) <= slo.gap for first, gaps in answers)
        result |= {f"goodput, requests/s, {slo}": good / seconds, f"within {slo}, %": 100 * good / len(answers)}
    return result


def ways(args):
    """Name -> how to start it."""
    kv = f"{args.kv_memory}MiB"
    limits = {"BATON_MAX_RUNNING": str(args.sequences), "BATON_TOKEN_BUDGET": "512"}
    def baton(threads, *flags, **settings):
        flags = ["--kv-memory", kv, "--context", str(args.context), "--threads", str(threads), *flags]
        settings = {f"BATON_{name.upper()}": str(value) for name, value in settings.items()}
        return lambda: Cluster(args.baton, args.model, flags, {**limits, "BATON_CHUNK": "256", **settings})
    # A core each: together as many as the others have.
    half = max(1, args.threads // 2)
    return {
        "split": baton(half, local_prompt=0, local_prefill=0),
        "conditional": baton(half),
        "aggregated": baton(args.threads, "--aggregated"),
        "aggregated, chunks of 32": baton(args.threads, "--aggregated", chunk=32),
        "llama.cpp": lambda: LlamaServer(args.llama, args.model, args.threads, args.sequences, args.context),
    }


def measure(args, start, number):
    """One run of one way."""
    server = start()
    try:
        # Pages, threads and connections are warm before the clock starts.
        asyncio.run(replay(server, [(0.0, 64, 8), (0.0, 600, 8)], 1_000 + number))
        requests = trace(args, args.seed + number)
        return figures(args, requests, *asyncio.run(replay(server, requests, number)))
    finally:
        server.close()


class Slo(typing.NamedTuple):
    """What an answer has to keep, in seconds: its first token, and 99% of its gaps between tokens."""
    first: float
    gap: float

    @staticmethod
    def read(text):
        return [Slo(*map(float, slo.split(":"))) for slo in text.split(",")]

    def __str__(self):
        return f"{self.first:g} s and {self.gap * 1000:g} ms"


def pair(text):
    low, high = (int(part) for part in text.split("-"))
    return low, high


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baton", default="target/release/baton")
    parser.add_argument("--llama", required=True, help="llama.cpp's llama-server")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="compute threads in all")
    parser.add_argument("--rates", default="0.5", help="requests a second, on average, with commas")
    parser.add_argument("--requests", type=int, default=40, help="of a run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way; each round has another trace")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--long-share", type=float, default=0.4, help="part of the prompts that are long")
    parser.add_argument("--long-prompt", type=pair, default=(1000, 1500), help="tokens of a long prompt, from-to")
    parser.add_argument("--short-prompt", type=pair, default=(50, 200), help="tokens of a short prompt, from-to")
    parser.add_argument("--answer", type=pair, default=(64, 128), help="tokens of an answer, from-to")
    parser.add_argument("--sequences", type=int, default=16, help="most sequences at a time")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--kv-memory", type=int, default=768, help="MiB of each Baton worker's KV pool")
    parser.add_argument("--slos", type=Slo.read, default="5:0.2,1:0.05",
                        help="SLOs: seconds until the first token, and seconds that 99%% of an answer's gaps between tokens may take")
    parser.add_argument("--ways", help="only these, separated by semicolons")
    parser.add_argument("--idle-patience", type=float, default=120, help="seconds to wait for an idle machine")
    parser.add_argument("--json", help="also write every run to this file")
    return parser.parse_args()


def table(args, chosen, rate):
    """Measures at one rate and prints the table. Returns every run, and whether the machine was idle."""
    args = argparse.Namespace(**{**vars(args), "rate": rate})
    all_ways, runs, idle = ways(args), {name: [] for name in chosen}, True
    for number in range(args.rounds):
        for name in chosen:
            idle &= wait_until_idle(0.1, args.idle_patience)
            print(f"{rate:g} requests/s, round {number + 1} of {args.rounds}: {name}", file=sys.stderr, flush=True)
            runs[name].append(measure(args, all_ways[name], number))
    cell = lambda values: f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"
    print(f"\n{rate:g} requests/s:\n")
    metrics = list(runs[chosen[0]][0])
    print_table(["metric", *chosen], [[m, *(cell([r[m] for r in runs[name]]) for name in chosen)] for m in metrics])
    return runs, idle


def main():
    args = arguments()
    all_ways = ways(args)
    chosen = [name.strip() for name in args.ways.split(";")] if args.ways else list(all_ways)
    if unknown := [name for name in chosen if name not in all_ways]:
        raise SystemExit(f"--ways has {unknown[0]!r}; there are {'; '.join(all_ways)}")
    tables = {rate: table(args, chosen, rate) for rate in map(float, args.rates.split(","))}
    print(f"\nMedian (lowest to highest) of {args.rounds} alternating runs of {args.requests} requests, {args.long_share:.0%} of them long. "
          "SLOs: time to the first token, and 99% of a request's gaps between tokens.")
    idle = all(idle for _, idle in tables.values())
    if not idle:
        print("The machine was NOT idle before each run: these figures mean nothing.")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"arguments": vars(args), "idle": idle, "runs": {rate: runs for rate, (runs, _) in tables.items()}}, file, indent=1)


if __name__ == "__main__":
    main()
