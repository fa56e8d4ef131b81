#!/usr/bin/env python3
"""Real text by a real model: prefill and decode worker on the GPU, against a worker on the CPU.

    text.py BATON MODEL.gguf [--backend cuda]

Continues a few beginnings, greedily. Token by token both must say the same with nearly the same log probability, until they part at two
tokens that are as likely as each other. Prints what was written, and one JSON object.
"""

import argparse
import json
import os
import sys
import urllib.request

from cluster import cluster

BEGINNINGS = ["Once upon a time", "One day, a little cat named Tom", "Lily and Ben like to play in the park. They"]
TOKENS = 60
# Of a log probability, where one side computes with 16 bits.
TOLERANCE = 0.15


def written(running, beginning):
    """Tokens, their log probabilities, and those of the likeliest at each place."""
    body = {"model": running.model, "prompt": beginning, "max_tokens": TOKENS, "temperature": 0, "logprobs": 3}
    request = urllib.request.Request(f"http://127.0.0.1:{running.http}/v1/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        choice = json.load(answer)["choices"][0]
    found = choice["logprobs"]
    return choice["text"], list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"]))


def parted(ours, theirs):
    """How many tokens agree, and what is wrong with the first that does not, if anything is."""
    for at, ((mine, p, likely), (other, q, _)) in enumerate(zip(ours, theirs)):
        if mine == other and abs(p - q) > TOLERANCE:
            return at, f"token {at}, {mine!r}: log probability {p:.3f}, on the CPU {q:.3f}"
        if mine != other:
            gap = p - likely.get(other, float("-inf"))
            return at, f"token {at}: {mine!r}, on the CPU {other!r}, {gap:.3f} apart" if gap > TOLERANCE else None
    return min(len(ours), len(theirs)), None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baton")
    parser.add_argument("model")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--log", type=argparse.FileType("w"), default=sys.stderr)
    args = parser.parse_args()
    args.baton, args.model = os.path.abspath(args.baton), os.path.abspath(args.model)
    with cluster(args) as split:
        split.model = json.loads(urllib.request.urlopen(f"http://127.0.0.1:{split.http}/v1/models").read())["data"][0]["id"]
        name, got = split.model, [written(split, beginning) for beginning in BEGINNINGS]
        over = split.carriers()
    args.backend = "cpu"
    with cluster(args, "--aggregated") as whole:
        whole.model = name
        want = [written(whole, beginning) for beginning in BEGINNINGS]
    agree, wrong = zip(*(parted(ours, theirs) for (_, ours), (_, theirs) in zip(got, want)))
    for beginning, (text, _), problem in zip(BEGINNINGS, got, wrong):
        print(f"{beginning}{text}".replace("\n", " "), f"({problem})" if problem else "", file=sys.stderr)
    print(json.dumps({"what": "text", "model": name, "answers": len(got), "right": sum(not problem for problem in wrong),
                      "tokens": TOKENS, "agree": list(agree), "transport": ", ".join(over)}), flush=True)
    sys.exit(any(wrong) or not over)


if __name__ == "__main__":
    main()
