#!/usr/bin/env python3
"""What splitting costs one request: time to first token of a prompt through the cluster, beside the same engine in one process.

    bench/split.py --baton target/release/baton --model smollm2 --tokens 1000 --rounds 5

Alternates three ways on the same cores: `split` (router, prefill worker, decode worker; KV over shared memory), `tcp` (the same, KV over
TCP) and `aggregated` (router and one worker that does both), and gives the engine alone (no router, no HTTP) as `engine`. For the split
ways it also gives the time until the second token, which is the first that needs the KV to have arrived. Nothing else may run.
"""

import argparse
import json
import statistics
import subprocess
import time

from cluster import Cluster, random_ids


def times(cluster, ids):
    """Seconds until the first and the second token."""
    path, body = cluster.completion(ids, 3)
    start, seen = time.monotonic(), []
    for line in cluster.request("POST", path, body):
        if line.startswith(b"data: {"):
            seen += [time.monotonic() - start] * cluster.tokens(json.loads(line[6:]))
    return seen[0], seen[1]


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
            times(cluster, random_ids(args.tokens, 1000 + round_number))
            measured[way].append(times(cluster, random_ids(args.tokens, round_number)))
            cluster.close()
        output = subprocess.run([args.baton, "bench", "engine", "--json", "--model", args.model, "--no-profile",
                                 "--metrics", f"prefill_{args.tokens}"], check=True, stdout=subprocess.PIPE, text=True).stdout
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
