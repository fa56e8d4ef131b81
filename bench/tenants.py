#!/usr/bin/env python3
"""Whether tenants share a cluster as docs/tenants.md says. Starts `baton up` with a file of keys and measures, in one run:

1. the time to the first token of a tenant that asks little (a quarter of what the workers can do), alone, and while another tenant floods
   the cluster with long prompts; in rounds of both, so that a machine whose speed changes from minute to minute changes both;
2. the tokens that two tenants of weight 1 and 3 are served while both ask for more than there is.

usage: bench/tenants.py [--model NAME] [--questions N] [--rounds N] [--seconds S]
"""
import argparse
import contextlib
import hashlib
import http.client
import json
import os
import pathlib
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
KEYS = {"calm": 1, "flood": 1, "one": 1, "three": 3}


class Cluster:
    def __init__(self, model, folder):
        keys = folder / "keys.toml"
        entry = '[[tenants]]\nname = "{}"\nsha256 = ["{}"]\nweight = {}\n'
        keys.write_text("".join(entry.format(n, hashlib.sha256(n.encode()).hexdigest(), w) for n, w in KEYS.items()))
        command = [ROOT / "target/release/baton", "up", "--model", model, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
        # Each worker has a core; every prompt is handed over.
        command += ["--internal", "127.0.0.1:0", "--threads", "1", "--kv-memory", "1GiB"]
        env = os.environ | {"BATON_KEYS_FILE": str(keys), "BATON_LOCAL_PREFILL": "1"}
        # A step is not to take a second of one core: who comes waits for the one that is computed.
        env |= {"BATON_CHUNK": "128", "BATON_TOKEN_BUDGET": "256"}
        # Half as many answers at a time as the second part's clients ask for: weights decide who is next.
        env |= {"BATON_MAX_RUNNING": "16"}
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            if " http://" in line and "admin" in line:
                self.port = int(line.split(" http://127.0.0.1:")[1].split()[0])
                self.admin = int(line.split("admin http://127.0.0.1:")[1].split()[0])
            if "Ctrl-C" in line:
                break

    def ask(self, tenant, prompt, tokens, connected=lambda opened: None):
        """Streams an answer; returns the seconds to its first token. `connected` is given the connection's socket."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.connect()
        connected(connection.sock)
        salt = f"{random.getrandbits(64):x}"
        ids = [random.randrange(1000, 40000) for _ in range(prompt)]
        body = {"model": "", "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body |= {"cache_salt": salt}
        begun, first = time.monotonic(), None
        connection.request("POST", "/v1/completions", json.dumps(body), {"Authorization": f"Bearer {tenant}"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.read().decode()}")
        for line in answer:
            if line.startswith(b"data: {"):
                if b'"error"' in line:
                    raise RuntimeError(line.decode())
                first = first or time.monotonic() - begun
        connection.close()
        return first

    def metric(self, name):
        connection = http.client.HTTPConnection("127.0.0.1", self.admin)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def stop(self):
        self.process.send_signal(2)
        self.process.wait(60)


class Flood:
    """Clients of a tenant that ask without a pause until they are stopped; `served` counts the tokens of what was answered."""

    def __init__(self, cluster, tenant, clients, prompt, tokens):
        self.cluster, self.tenant, self.prompt, self.tokens = cluster, tenant, prompt, tokens
        self.done, self.served, self.sockets, self.lock = threading.Event(), 0, {}, threading.Lock()
        self.threads = [threading.Thread(target=self.client, args=[index], daemon=True) for index in range(clients)]
        for thread in self.threads:
            thread.start()

    def client(self, index):
        while not self.done.is_set():
            try:
                self.cluster.ask(self.tenant, self.prompt, self.tokens, lambda opened: self.sockets.update({index: opened}))
            except (OSError, http.client.HTTPException, ValueError, AttributeError):
                if not self.done.is_set():
                    raise
                return
            with self.lock:
                self.served += self.prompt + self.tokens

    def stop(self):
        """Does not wait for the answers that have not come: their connections are shut."""
        self.done.set()
        for thread in self.threads:
            while thread.is_alive():
                for connection in list(self.sockets.values()):
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
                thread.join(0.1)


def quantile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--questions", type=int, default=200, help="of the first part, alone and beside the flood each")
    parser.add_argument("--rounds", type=int, default=4, help="of the first part")
    parser.add_argument("--seconds", type=float, default=90)
    args = parser.parse_args()
    subprocess.run(["cargo", "build", "--release", "-p", "baton-cli"], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(args.model, pathlib.Path(folder))
        try:
            measure(cluster, args)
        finally:
            cluster.stop()


def measure(cluster, args):
    measure_times(cluster, args)
    measure_weights(cluster, args)


def measure_times(cluster, args):
    question = lambda: cluster.ask("calm", 600, 8)
    for _ in range(3):
        question()
    times = {"alone": [], "beside a flood": []}
    waits = []
    for _ in range(args.rounds):
        alone = [question() for _ in range(args.questions // args.rounds)]
        pause = 3 * statistics.median(alone)
        times["alone"] += alone
        flood = Flood(cluster, "flood", 24, 3000, 32)
        time.sleep(10)
        waits.append(cluster.metric("baton_waiting_choices"))
        for _ in alone:
            time.sleep(pause)
            times["beside a flood"].append(question())
        flood.stop()
        # Until the workers have left what was broken off.
        time.sleep(5)
    print(f"\nTime to the first token of 600-token prompts, {len(times['alone'])} questions with pauses; the flood: 24 clients, 3,000-token")
    print(f"prompts, at least {min(waits):.0f} of them waiting in the router when the questions began.\n")
    print("| | p50 | p99 |\n| --- | ---: | ---: |")
    for name, values in times.items():
        print(f"| {name} | {1e3 * statistics.median(values):.0f} ms | {1e3 * quantile(values, 0.99):.0f} ms |")
    ratio = [quantile(times["beside a flood"], q) / quantile(times["alone"], q) for q in (0.5, 0.99)]
    print(f"| ratio | {ratio[0]:.2f} | {ratio[1]:.2f} |")


def measure_weights(cluster, args):
    floods = {"one": Flood(cluster, "one", 16, 200, 20), "three": Flood(cluster, "three", 16, 400, 60)}
    time.sleep(args.seconds / 4)
    before = {tenant: flood.served for tenant, flood in floods.items()}
    time.sleep(args.seconds)
    waits = cluster.metric("baton_waiting_choices")
    tokens = {tenant: flood.served - before[tenant] for tenant, flood in floods.items()}
    for flood in floods.values():
        flood.stop()
        # Until the workers have left what was broken off.
        time.sleep(5)
    print(f"\nTokens served in {args.seconds:.0f} s, both with 16 clients, {waits:.0f} of them waiting in the router at the end: weight 1 {tokens['one']}, weight 3 {tokens['three']}, ", end="")
    print(f"ratio {tokens['three'] / max(1, tokens['one']):.2f}")


if __name__ == "__main__":
    sys.exit(main())
