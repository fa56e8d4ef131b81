#!/usr/bin/env python3
"""A whole cluster on one GPU: prefill and decode worker as processes of their own, against one worker that does both.

    cluster.py BATON [--backend cuda] [--model random:smollm2-135m] [--transport auto] [--prefill-backend cpu]

Asks both the same questions, one at a time and together, and fails unless every answer is the same (greedy, with the log probabilities
of its tokens). With `--prefill-backend` prompts are computed on another kind of processor, whose rounding is another: then an answer must
be the same as far as the next token does not hang on rounding alone. With `--handoff TOKENS` it also measures a prompt of that length:
time to first token, and what its KV took to be handed over. One JSON object a line.
"""

import argparse
import concurrent.futures
import contextlib
import json
import math
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request


def free_ports(count):
    """So many that differ: they are held together while they are chosen."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def get(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


# How far log probabilities of a token may be apart where prompts are computed on another processor, and how much less likely than the best
# token one may be that is chosen instead of it.
NEAR = 0.25
# Tokens of an answer, and of the likeliest for each that are told.
ANSWER, TOP = 32, 5


class Cluster:
    """`baton up`, ready; with a prefill worker beside it where that has a backend of its own."""

    def __init__(self, args, *flags, prefill=None):
        self.model, self.worker = args.model, None
        self.http, grpc, internal = free_ports(3)
        command = [args.baton, "up", "--model", args.model, "--backend", args.backend, "--transport", args.transport,
                   "--http", f"127.0.0.1:{self.http}", "--grpc", f"127.0.0.1:{grpc}",
                   "--internal", f"127.0.0.1:{internal}", "--log", "info", "--start-timeout", "300s",
                   # Others join it below.
                   "--insecure-internal", *flags]
        # Every prompt is handed over, however short.
        environment = {**os.environ, "BATON_LOCAL_PREFILL": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=args.log, text=True, env=environment)
        # It prints once all workers serve, and where its router's admin endpoint is.
        told = next((line for line in self.process.stdout if "  admin http://" in line), None)
        if not told:
            raise SystemExit(f"cluster.py: {' '.join(command)} ended with {self.process.wait()}; see its log")
        self.admin = told.split("  admin ")[1].strip()
        if prefill:
            command = [args.baton, "prefill", "--model", args.model, "--backend", prefill, "--transport", args.transport,
                       "--registry", f"http://127.0.0.1:{internal}", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log", "info"]
            self.worker = subprocess.Popen(command, stdout=args.log, stderr=args.log, env=environment)
            self.until_it_serves()

    def until_it_serves(self):
        for _ in range(600):
            if any(member["role"] == "prefill" for member in self.members()):
                return
            if self.worker.poll() is not None:
                break
            time.sleep(0.1)
        self.stop()
        raise SystemExit("cluster.py: the prefill worker does not serve; see its log")

    def members(self):
        return json.loads(get(f"{self.admin}/cluster"))["members"]

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
        """The text, and (token, its log probability, those of the likeliest) of each token."""
        with self.post(question, tokens, logprobs=True, top_logprobs=TOP) as answer:
            choice = json.load(answer)["choices"][0]
        tops = lambda token: [(top["token"], top["logprob"]) for top in token["top_logprobs"]]
        return choice["message"]["content"], [(t["token"], t["logprob"], tops(t)) for t in choice["logprobs"]["content"]]

    def carriers(self):
        """The transports that have carried anything."""
        return sorted(set(re.findall(r'baton_transfer_bytes_total{[^}]*transport="([^"]+)"[^}]*} [1-9]', self.metrics())))

    def metrics(self):
        """Of the prefill workers, which send."""
        return "".join(get(f"{member['admin']}/metrics") for member in self.members() if member["role"] == "prefill")

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
        for process in filter(None, (self.worker, self.process)):
            process.send_signal(signal.SIGINT)
        for process in filter(None, (self.worker, self.process)):
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


@contextlib.contextmanager
def cluster(args, *flags, prefill=None):
    running = Cluster(args, *flags, prefill=prefill)
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
    alone = [running.ask(question, ANSWER) for question in questions()]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda question: running.ask(question, ANSWER), questions()))
    return alone + together


def near(got, want):
    """(whether answers are the same as far as rounding lets them, tokens that are)."""
    for at, ((token, logprob, _), (wanted, best, tops)) in enumerate(zip(got[1], want[1])):
        if token != wanted:
            # From here on they go on from different tokens. Another may be chosen only where it was as good as this one.
            return dict(tops).get(token, -math.inf) >= best - NEAR, at
        if abs(logprob - best) > NEAR:
            return False, at
    return len(got[1]) == len(want[1]), len(want[1])


def compare(args):
    # Without prefill workers of its own where one of another backend comes beside it.
    flags = ["--aggregated"] if args.prefill_backend else []
    with cluster(args, *flags, prefill=args.prefill_backend) as split:
        got = answers(split)
        (_, handoffs, moved), over = split.transferred(), split.carriers()
    with cluster(args, "--aggregated") as whole:
        want = answers(whole)
    pairs = list(zip(got, want))
    plain = lambda answer: (answer[0], [logprob for _, logprob, _ in answer[1]])
    same = sum(plain(a) == plain(b) for a, b in pairs)
    text = sum(a[0] == b[0] for a, b in pairs)
    count = len(pairs)
    record = {"what": "cluster", "model": args.model, "backend": args.backend, "answers": count, "same_text": text,
              "same_logprobs": same, "handoffs": handoffs, "bytes": moved, "transport": ", ".join(over)}
    if args.prefill_backend:
        agree = [near(a, b) for a, b in pairs]
        same = sum(is_near for is_near, _ in agree)
        record.update(prefill_backend=args.prefill_backend, near=same, near_tokens=sum(tokens for _, tokens in agree),
                      tokens=sum(len(b[1]) for _, b in pairs))
    print(json.dumps(record), flush=True)
    return same == count and handoffs > 0 and (args.transport == "auto" or over == [args.transport])


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
    parser.add_argument("--prefill-backend", metavar="BACKEND")
    parser.add_argument("--handoff", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--log", type=argparse.FileType("w"), default=sys.stderr)
    args = parser.parse_args()
    args.baton = os.path.abspath(args.baton)
    sys.exit(not (handoff(args) if args.handoff else compare(args)))


if __name__ == "__main__":
    main()
