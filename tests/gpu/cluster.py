#!/usr/bin/env python3
"""A whole cluster on one GPU: prefill and decode worker as processes of their own, against one worker that does both.

    cluster.py BATON [--backend cuda] [--model random:smollm2-135m] [--transport auto]

Asks both the same questions, one at a time and together, and fails unless every answer is the same (greedy, with the log probabilities of
its tokens). With `--handoff TOKENS` it also measures a prompt of that length: time to first token, and what its KV took to be handed over.
One JSON object a line.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def get(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


class Cluster:
    """`baton up`, ready."""

    def __init__(self, args, *flags):
        self.model = args.model
        self.http, grpc = free_port(), free_port()
        command = [args.baton, "up", "--model", args.model, "--backend", args.backend, "--transport", args.transport,
                   "--http", f"127.0.0.1:{self.http}", "--grpc", f"127.0.0.1:{grpc}", "--log", "info",
                   "--start-timeout", "300s", *flags]
        # Every prompt is handed over, however short.
        environment = {**os.environ, "BATON_LOCAL_PREFILL": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=args.log, text=True, env=environment)
        # It prints once all workers serve.
        if not self.process.stdout.readline():
            raise SystemExit(f"cluster.py: {' '.join(command)} ended with {self.process.wait()}; see its log")

    def post(self, question, tokens, **more):
        body = {"model": self.model, "messages": [{"role": "user", "content": question}], "temperature": 0,
                "max_tokens": tokens, **more}
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}/v1/chat/completions",
                                         json.dumps(body).encode(), {"content-type": "application/json"})
        return urllib.request.urlopen(request, timeout=300)

    def stream(self, question, tokens):
        """When each token came, in seconds."""
        began = time.perf_counter()
        with self.post(question, tokens, stream=True, logprobs=True) as answer:
            return [time.perf_counter() - began for line in answer if b'"logprob"' in line]

    def ask(self, question, tokens):
        with self.post(question, tokens, logprobs=True) as answer:
            choice = json.load(answer)["choices"][0]
        return choice["message"]["content"], [token["logprob"] for token in choice["logprobs"]["content"]]

    def carriers(self):
        """The transports that have carried anything."""
        return sorted(set(re.findall(r'baton_transfer_bytes_total{[^}]*transport="([^"]+)"[^}]*} [1-9]', self.metrics())))

    def metrics(self):
        """Of the prefill workers, which send."""
        members = json.loads(get(f"http://127.0.0.1:{self.http}/cluster"))["members"]
        return "".join(get(f"{member['admin']}/metrics") for member in members if member["role"] == "prefill")

    def transferred(self):
        """Seconds, handoffs and bytes so far."""
        total = [0.0, 0.0, 0.0]
        names = ["baton_transfer_seconds_sum", "baton_transfer_seconds_count", "baton_transfer_bytes_total"]
        for line in self.metrics().splitlines():
            for i, name in enumerate(names):
                if re.match(rf"{name}[{{ ]", line):
                    total[i] += float(line.rsplit(" ", 1)[1])
        return total

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@contextlib.contextmanager
def cluster(args, *flags):
    running = Cluster(args, *flags)
    try:
        yield running
    finally:
        running.stop()


def questions():
    words = "the quick brown fox jumps over a lazy dog while rain falls on green hills ".split()
    for length in (1, 5, 33, 90, 200, 260):
        yield " ".join(words[i * 7 % len(words)] + str(i % 10) for i in range(length))


def answers(running):
    """Alone, and all at once: batches change nothing."""
    alone = [running.ask(question, 32) for question in questions()]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda question: running.ask(question, 32), questions()))
    return alone, together


def compare(args):
    with cluster(args) as split:
        got = answers(split)
        (_, handoffs, moved), over = split.transferred(), split.carriers()
    with cluster(args, "--aggregated") as whole:
        want = answers(whole)
    same = sum(a == b for a, b in zip(got[0] + got[1], want[0] + want[1]))
    text = sum(a[0] == b[0] for a, b in zip(got[0] + got[1], want[0] + want[1]))
    count = len(got[0] + got[1])
    print(json.dumps({"what": "cluster", "model": args.model, "backend": args.backend, "answers": count, "same_text": text,
                      "same_logprobs": same, "handoffs": handoffs, "bytes": moved, "transport": ", ".join(over)}), flush=True)
    return same == count and handoffs > 0


def handoff(args):
    """The byte-level tokenizer makes a token of each character."""
    with cluster(args) as split:
        split.ask("warm up " * 20, 2)
        firsts, tails, each = [], [], []
        for round in range(5):
            before = split.transferred()
            times = split.stream(f"{round} " + "x" * (args.handoff - 40), 10)
            gaps = [b - a for a, b in zip(times, times[1:])]
            firsts.append(times[0])
            # The second token comes from the decode worker: later than the others by what of the handoff nothing hid.
            tails.append(max(0.0, gaps[0] - statistics.median(gaps[1:])))
            after = split.transferred()
            each.append([b - a for a, b in zip(before, after)])
        over = split.carriers()
    seconds, _, moved = (statistics.median(column) for column in zip(*each))
    print(json.dumps({"what": "handoff", "model": args.model, "tokens": args.handoff, "ttft_seconds": statistics.median(firsts),
                      "exposed_seconds": statistics.median(tails), "transfer_seconds": seconds, "bytes": moved, "transport": ", ".join(over)}), flush=True)
    return moved > 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baton")
    parser.add_argument("--model", default="random:smollm2-135m")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--handoff", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--log", type=argparse.FileType("w"), default=sys.stderr)
    args = parser.parse_args()
    args.baton = os.path.abspath(args.baton)
    sys.exit(not (handoff(args) if args.handoff else compare(args)))


if __name__ == "__main__":
    main()
