#!/usr/bin/env python3
"""What splitting costs one request: time to first token of a prompt through the cluster, beside the same engine in one process.

    bench/split.py --baton target/release/baton --model smollm2 --tokens 1000 --rounds 5

Alternates three ways on the same cores: `split` (router, prefill worker, decode worker; KV over shared memory), `tcp` (the same, KV over
TCP) and `aggregated` (router and one worker that does both), and gives the engine alone (no router, no HTTP) as `engine`. For the split
ways it also gives the time until the second token, which is the first that needs the KV to have arrived. Nothing else may run.
"""

import argparse
import http.client
import json
import signal
import socket
import statistics
import subprocess
import time


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Cluster:
    """`baton up` with some flags, until closed."""

    def __init__(self, baton, model, flags):
        self.port = free_port()
        addresses = ["--http", f"127.0.0.1:{self.port}", "--grpc", f"127.0.0.1:{free_port()}"]
        self.process = subprocess.Popen([baton, "up", "--model", model, *addresses, *flags], stdout=subprocess.DEVNULL)
        self.model = None
        while self.model is None:
            if self.process.poll() is not None:
                raise SystemExit("the cluster did not start; its message is above")
            time.sleep(0.1)
            try:
                if self.request("GET", "/ready").status == 200:
                    self.model = json.load(self.request("GET", "/v1/models"))["data"][0]["id"]
            except OSError:
                pass

    def request(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request(method, path, body and json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse()

    def times(self, ids):
        """Seconds until the first and the second token."""
        body = {"model": self.model, "prompt": ids, "max_tokens": 3, "temperature": 0, "stream": True,
                "ignore_eos": True, "return_token_ids": True}
        start, seen = time.monotonic(), []
        for line in self.request("POST", "/v1/completions", body):
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices") or [{}]
                seen += [time.monotonic() - start] * len(choices[0].get("token_ids") or [])
        return seen[0], seen[1]

    def close(self):
        self.process.send_signal(signal.SIGINT)
        self.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baton", default="target/release/baton")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    ways = {"split": [], "tcp": ["--transport", "tcp"], "aggregated": ["--aggregated"]}
    measured = {way: [] for way in ways}
    engine = []
    for round_number in range(args.rounds):
        for way, flags in ways.items():
            cluster = Cluster(args.baton, args.model, flags)
            ids = lambda salt: [(i * 2654435761 + salt * 97) % 40000 for i in range(args.tokens)]
            cluster.times(ids(1000 + round_number))
            measured[way].append(cluster.times(ids(round_number)))
            cluster.close()
        output = subprocess.run([args.baton, "bench", "engine", "--json", "--model", args.model, "--metrics",
                                 f"prefill_{args.tokens}"], check=True, stdout=subprocess.PIPE, text=True).stdout
        engine.append(args.tokens / json.loads(output.splitlines()[-1])["value"])
    alone = statistics.median(engine)
    print(f"prompt of {args.tokens} tokens, medians of {args.rounds}; the engine alone takes {alone * 1000:.0f} ms")
    print("| way | first token, ms | of the engine alone | second token after, ms |\n| --- | --- | --- | --- |")
    for way, runs in measured.items():
        first = statistics.median(r[0] for r in runs)
        gap = statistics.median(r[1] - r[0] for r in runs)
        print(f"| {way} | {first * 1000:.0f} | {first / alone:.3f} | {gap * 1000:.1f} |")


if __name__ == "__main__":
    main()
