#!/usr/bin/env python3
"""How much sooner a prompt is answered whose prefix is in the pool, in host memory, on disk or in an object store, than one that is computed.

    bench/tiers.py [--model NAME] [--lengths 2000,8000] [--rounds N] [--disk DIR] [--object URL] [--brief]
        One worker that computes and answers, with a small pool. Each prompt is answered once (computed), again (from the pool), again after others
        have taken its place in the pool (from host memory), and again after the worker was killed and started anew (from disk). Prints the time to
        the first token of each, and then how the time between the tokens of another answer changes while short prompts come, while long ones come
        whose prefixes are in the pool, and while theirs are loaded from host memory, from disk, and from another process of the cluster. At last the
        prefixes are in another process, and come over shared memory and over TCP.
        Before that, how long batch work that gave way to a prompt waits for its next token once that prompt is answered, without a store and with host memory.
        With --object, instead of a disk the worker has this object store, as --kv-object has it; AWS's variables say where S3 is.

target/release/baton must be built. The machine should be idle.
"""
import argparse
import http.client
import itertools
import json
import os
import pathlib
import signal
import statistics
import subprocess
import tempfile
import threading
import time

from cluster import Cluster, random_ids

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Seconds between the prompts that come beside an answer.
PAUSE = 0.2
# Where prompts come from beside an answer.
PLACES = ["host memory", "disk", "another process, shm", "another process, tcp"]
# Prompts of which a tenant tries to find out whether another one has asked them, and the tokens of each.
SECRETS, SECRET = 60, 500


def ask(cluster, ids, tokens=2, tenant="one", times=None, **more):
    """Seconds to the first token, seconds between the later ones, and tokens of the prompt that were not computed. `times`: gets when each token came."""
    path, body = cluster.completion(ids, tokens)
    body |= {"stream_options": {"include_usage": True}, "cache_salt": tenant, **more}
    connection = http.client.HTTPConnection("127.0.0.1", cluster.port)
    begun, times, cached = time.perf_counter(), [] if times is None else times, None
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"{answer.status}: {answer.read().decode()}")
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if Cluster.tokens(event):
            times.append(time.perf_counter())
        if event.get("usage"):
            cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    connection.close()
    return times[0] - begun, [b - a for a, b in zip(times, times[1:])], cached


def worker(cluster):
    children = subprocess.run(["pgrep", "-P", str(cluster.process.pid), "-a"], capture_output=True, text=True).stdout
    return next(int(line.split()[0]) for line in children.splitlines() if " decode" in line)


def restart(cluster):
    before = worker(cluster)
    os.kill(before, signal.SIGKILL)
    while True:
        time.sleep(0.2)
        try:
            if worker(cluster) != before and cluster.request("GET", "/ready").status == 200:
                # Until it has read what is on its disk.
                ask(cluster, random_ids(8, 999_999), 2)
                return time.sleep(1)
        except (OSError, StopIteration, SystemExit):
            pass


def times(options, disk):
    below = ["--kv-object", options.object] if options.object else ["--kv-disk", disk, "--kv-disk-size", "4GiB"]
    cluster = Cluster(options.baton, options.model, ["--aggregated", "--kv-memory", options.pool, "--kv-host", "2GiB", *below])
    lowest = "object store" if options.object else "disk"
    salt = iter(range(1, 1_000_000))
    try:
        ask(cluster, random_ids(500, next(salt)))
        for length in options.lengths:
            of = {"computed": [], "pool": [], "host memory": [], lowest: []}
            for _ in range(options.rounds):
                prompt, before = random_ids(length, next(salt)), random_ids(length, next(salt))
                if options.object:
                    ask(cluster, before)
                for tier in of:
                    if tier == "host memory":
                        for _ in range(-(-options.evict // options.evicts)):
                            ask(cluster, random_ids(options.evicts, next(salt)))
                        # Until what the last of them left is saved: its blocks are in use meanwhile.
                        time.sleep(1)
                    if tier == lowest:
                        # Until all is there.
                        time.sleep(10 if options.object else 2)
                        restart(cluster)
                        if options.object:
                            # The first load of a worker finds out how fast the store is; it may be given up.
                            ask(cluster, before)
                            time.sleep(5)
                    first, _, cached = ask(cluster, prompt)
                    if (cached >= length - 16) != (tier != "computed"):
                        raise SystemExit(f"{tier}: {cached} of {length} tokens were cached")
                    of[tier].append(first)
            tell(f"{options.model}, {length} tokens", of)
        if not options.brief:
            beside(cluster, options, salt)
            secret(cluster, salt)
    finally:
        cluster.close()
    if not options.brief:
        beside_others(options, disk, PLACES[1:])
        preempted(options)
    for transport in ("shm", "tcp"):
        peers(options, transport)


def preempted(options):
    """How long batch work that gave way to a prompt of as many tokens waits for its next token once that prompt is answered."""
    length, waits = options.lengths[-1], {}
    for where, flags in (("no store", []), ("host memory", ["--kv-host", "2GiB"])):
        cluster = Cluster(options.baton, options.model, ["--aggregated", "--kv-memory", options.pool, *flags])
        try:
            ask(cluster, random_ids(500, 1))
            for round in range(options.rounds):
                came = []
                batch = lambda: ask(cluster, random_ids(length, 2 * round + 2), 150, times=came, service_tier="flex")
                thread = threading.Thread(target=batch)
                thread.start()
                while thread.is_alive() and len(came) < 50:
                    time.sleep(0.05)
                ask(cluster, random_ids(length, 2 * round + 3))
                answered = time.perf_counter()
                thread.join()
                waits.setdefault(where, []).append(min(at for at in came if at > answered) - answered)
        finally:
            cluster.close()
    told = ", ".join(f"{statistics.median(waited):.2f} s with {where}" for where, waited in waits.items())
    print(f"{options.model}: batch work of {length} tokens that gave way goes on after {told}", flush=True)


def secret(cluster, salt):
    """Whether the time to the first token tells a tenant which prompts another one has asked: ranks of both kinds of times, compared (Mann and Whitney)."""
    stored = [random_ids(SECRET, next(salt)) for _ in range(SECRETS)]
    for prompt in stored:
        ask(cluster, prompt, tenant="one")
    times = []
    for at, prompt in enumerate(stored):
        pair = (("stored", prompt), ("new", random_ids(SECRET, next(salt))))
        for kind, ids in pair if at % 2 else reversed(pair):
            times.append((ask(cluster, ids, tenant="two")[0], kind))
    of = {kind: [seconds for seconds, which in times if which == kind] for kind in ("stored", "new")}
    ranks = sum(rank for rank, (_, kind) in enumerate(sorted(times), 1) if kind == "stored")
    count = len(stored)
    z = (ranks - count * (2 * count + 1) / 2) / (count * count * (2 * count + 1) / 12) ** 0.5
    print(f"  first token of {SECRET} tokens that another tenant has stored: {statistics.median(of['stored']) * 1e3:.1f} ms, that are new: "
          f"{statistics.median(of['new']) * 1e3:.1f} ms, medians of {count}; z = {z:.2f} (nothing can be told from -2 to 2)")


def peers(options, transport):
    """The time to the first token where another process of the cluster, a KV store, holds the prefix and the worker that is asked is new."""
    stores = ["--kv-stores", "1", "--kv-store-memory", "2GiB", "--transport", transport]
    cluster = Cluster(options.baton, options.model, ["--aggregated", "--kv-memory", options.pool, *stores])
    try:
        ask(cluster, random_ids(500, 1))
        for at, length in enumerate(options.lengths):
            computed, fetched = [], []
            for round in range(options.rounds):
                prompt = random_ids(length, 1_000 * (at + 2) + round)
                computed.append(ask(cluster, prompt)[0])
                # Until the store has taken it and the router has heard of that.
                time.sleep(3)
                restart(cluster)
                # A first fetch opens the session between the two.
                ask(cluster, random_ids(500, 1))
                time.sleep(1)
                first, _, cached = ask(cluster, prompt)
                if cached < length - 16:
                    raise SystemExit(f"another process, {transport}: {cached} of {length} tokens were cached")
                fetched.append(first)
            tell(f"{options.model}, {length} tokens, another process", {"computed": computed, transport: fetched})
    finally:
        cluster.close()


def tell(what, of):
    computed = statistics.median(of["computed"])
    print(what)
    for tier, firsts in of.items():
        median = statistics.median(firsts)
        print(f"  {tier:12} {median * 1e3:9.1f} ms to the first token, {computed / median:6.1f} times as soon as computed", flush=True)


def beside(cluster, options, salt, others=("pool", "host memory"), count=8):
    """The time between tokens of an answer: alone; while short prompts come; and while prompts come whose prefixes are elsewhere: in the pool, or where
    they are loaded from. Each in turn, as a machine is not the same all the time, and all gaps of a kind together."""
    length = options.lengths[0]
    percentile = lambda gaps, share: sorted(gaps)[int(len(gaps) * share)] * 1e3
    gaps, firsts = {}, {}
    # One token after the last whole block: only that is computed, wherever the rest comes from.
    prompts = [random_ids(length // 16 * 16 + 1, next(salt)) for _ in range(count)]
    short = [random_ids(17, next(salt)) for _ in range(2)]
    for prompt in prompts:
        ask(cluster, prompt)
        # Until it is where it is to be.
        time.sleep(0.3)
    time.sleep(3)
    turns = {"alone": None, "17 tokens": itertools.cycle(short), "pool": itertools.cycle(prompts[-2:])}
    turns |= {where: itertools.cycle(prompts) for where in others if where != "pool"}
    for _ in range(options.answers):
        for where in ("alone", "17 tokens", *others):
            for prompt in {"17 tokens": short, "pool": prompts[-2:]}.get(where, ()):
                ask(cluster, prompt)
            took, turn = firsts.setdefault(where, []), turns[where]
            answer = lambda: gaps.setdefault(where, []).extend(ask(cluster, random_ids(64, next(salt)), options.tokens)[1])
            thread = threading.Thread(target=answer)
            thread.start()
            while turn and thread.is_alive():
                prompt = next(turn)
                first, _, cached = ask(cluster, prompt, 1)
                if cached < len(prompt) // 16 * 16:
                    raise SystemExit(f"{where}: {cached} of {len(prompt)} tokens were cached")
                took.append(first)
                time.sleep(PAUSE)
            thread.join()
    print(f"between tokens of another answer, {options.answers} times {options.tokens} tokens of each kind")
    alone = percentile(gaps["alone"], 0.99)
    for where, times in gaps.items():
        said = {"alone": "no prompt", "17 tokens": "prompts of 17 tokens in the pool"}.get(where, f"prompts of {length} tokens from {where}")
        came = f", {len(firsts[where])} came, first token after {statistics.median(firsts[where]) * 1e3:.0f} ms" if firsts[where] else ""
        p99 = percentile(times, 0.99)
        print(f"  beside {said}: median {percentile(times, 0.5):.1f} ms, p90 {percentile(times, 0.9):.1f} ms, p99 {p99:.1f} ms, "
              f"{p99 / alone:.2f} times alone{came}", flush=True)


def beside_others(options, disk, places):
    """As `beside`, where prefixes come from disk, as host memory has room for few of them, and where a KV store of the cluster has them. Each comes again
    after some seconds: for one a router takes what was answered for held where it was."""
    store = ["--kv-stores", "1", "--kv-store-memory", "4GiB", "--transport"]
    others = {"host memory": ["--kv-host", "2GiB"], "disk": ["--kv-host", options.little, "--kv-disk", f"{disk}/beside", "--kv-disk-size", "4GiB"]}
    others |= {f"another process, {transport}": [*store, transport] for transport in ("shm", "tcp")}
    for where in places:
        cluster = Cluster(options.baton, options.model, ["--aggregated", "--kv-memory", options.pool, *others[where]])
        try:
            ask(cluster, random_ids(500, 1))
            salt = itertools.count(2)
            match where:
                case "host memory": beside(cluster, options, salt)
                case "disk": beside(cluster, options, salt, (where,))
                case _: beside(cluster, options, salt, (where,), count=12)
        finally:
            cluster.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", default="2000,8000", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--pool", default="256MiB", help="a worker's pool: two prompts of the longest at least")
    parser.add_argument("--evict", default=12_000, type=int, help="tokens of other prompts after which none of a prompt is in the pool")
    parser.add_argument("--evicts", default=2_000, type=int, help="tokens of each of these")
    parser.add_argument("--answers", default=5, type=int, help="answers beside which prompts come, of each kind")
    parser.add_argument("--tokens", default=1_000, type=int, help="tokens of such an answer")
    parser.add_argument("--little", default="128MiB", help="host memory from which a prompt of the shortest length is gone after three others")
    parser.add_argument("--beside", type=lambda text: text.split(";"), help=f"only what loads from these places do to other answers, with semicolons: {'; '.join(PLACES)}")
    parser.add_argument("--disk", help="a folder on the disk to measure; default: one in the target folder")
    parser.add_argument("--object", help="an object store, s3://BUCKET/PREFIX or file:///DIRECTORY")
    parser.add_argument("--brief", action="store_true", help="only times to the first token: with a large model the rest takes long")
    parser.add_argument("--baton", default=ROOT / "target/release/baton", type=pathlib.Path, help="default: target/release/baton")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.disk or ROOT / "target") as disk:
        if options.beside:
            beside_others(options, disk, options.beside)
        else:
            times(options, disk)


if __name__ == "__main__":
    main()
