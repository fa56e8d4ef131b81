#!/usr/bin/env python3
"""Moves a prompt's KV blocks with Baton and with its peers, in turn, and prints one table of medians and ratios.

    bench/transfer --shape smollm2 --rounds 5

Every row moves the same bytes in pieces of the same size (one layer of one block) between two processes over TCP loopback, except where it
says otherwise. Baton's handoffs are timed from opening to the verified answer, digests of both sides included; the peers check
nothing. Each peer runs with its defaults and TCP as its only transport. A peer that does not run says why in its row.
"""

import argparse
import base64
import json
import os
import re
import site
import statistics
import subprocess
import sys
import time

# Layers, KV heads, head dimension; 16 slots a block, f16.
SHAPES = {"smollm2": (30, 3, 64), "llama-3.1-8b": (32, 8, 128)}
PORT = 13377
# Mooncake takes no more pieces at once.
BATCH = 512


def environment(venv):
    """Libraries the wheels need, and TCP only."""
    packages = site.getsitepackages()[0]
    libraries = [f"{venv}/deb/usr/lib/x86_64-linux-gnu", f"{venv}/deb/lib/x86_64-linux-gnu", f"{packages}/libucx/lib"]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries), "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo",
            "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR", "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "3"}


def buffer(size):
    """Memory whose pages exist, and its address."""
    import numpy
    memory = numpy.ones(size, dtype=numpy.uint8)
    return memory, memory.ctypes.data


class Lines:
    """What a helper process says in lines; other libraries' output is ignored."""

    def __init__(self, arguments, env):
        self.process = subprocess.Popen([sys.executable, __file__, *arguments], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

    def hear(self):
        for line in self.process.stdout:
            if line.startswith("@ "):
                return json.loads(line[2:])
        self.process.wait()
        said = self.process.stderr.read().strip().splitlines()
        raise RuntimeError(said[-1] if said else f"it ended with {self.process.returncode}")

    def say(self, value):
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def end(self):
        self.process.kill()
        self.process.wait()


def tell(value):
    print("@ " + json.dumps(value), flush=True)


def nixl_agent(name):
    from nixl._api import nixl_agent, nixl_agent_config
    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def pieces(address, size, count):
    return [(address + i * size, size, 0) for i in range(count)]


def serve_nixl(size, count):
    agent = nixl_agent("target")
    memory, address = buffer(size * count)
    agent.register_memory([(address, size * count, 0, "")], "DRAM")
    tell({"metadata": base64.b64encode(agent.get_agent_metadata()).decode(), "address": address})
    sys.stdin.readline()


def drive_nixl(size, count, peer):
    agent = nixl_agent("source")
    memory, address = buffer(size * count)
    agent.register_memory([(address, size * count, 0, "")], "DRAM")
    remote = agent.add_remote_agent(base64.b64decode(peer["metadata"]))
    local = agent.get_xfer_descs(pieces(address, size, count), "DRAM")
    target = agent.get_xfer_descs(pieces(peer["address"], size, count), "DRAM")
    handle = agent.initialize_xfer("WRITE", local, target, remote)

    def move():
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")
    move.keeps = memory
    return move


def mooncake_engine():
    from mooncake.engine import TransferEngine
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("its engine does not start")
    return engine


def serve_mooncake(size, count):
    engine = mooncake_engine()
    memory, address = buffer(size * count)
    engine.register_memory(address, size * count)
    tell({"target": f"127.0.0.1:{engine.get_rpc_port()}", "address": address})
    sys.stdin.readline()


def drive_mooncake(size, count, peer):
    engine = mooncake_engine()
    memory, address = buffer(size * count)
    engine.register_memory(address, size * count)
    starts = range(0, count, BATCH)

    def move():
        for first in starts:
            numbers = range(first, min(first + BATCH, count))
            sources, targets = ([base + i * size for i in numbers] for base in (address, peer["address"]))
            if engine.batch_transfer_sync_write(peer["target"], sources, targets, [size] * len(numbers)):
                raise RuntimeError("a batch failed")
    move.keeps = memory
    return move


def serve(library, size, count):
    {"nixl": serve_nixl, "mooncake": serve_mooncake}[library](size, count)


def drive(library, size, count):
    """For each line in, one transfer's seconds out."""
    peer = json.loads(sys.stdin.readline())
    move = {"nixl": drive_nixl, "mooncake": drive_mooncake}[library](size, count, peer)
    move()
    tell("ready")
    for _ in sys.stdin:
        start = time.perf_counter()
        move()
        tell(time.perf_counter() - start)


class Pair:
    """A library's two processes, connected and warm. Not alive while others are measured: their threads poll."""

    def __init__(self, library, size, count, env):
        arguments = [library, str(size), str(count)]
        self.server = Lines(["serve", *arguments], env)
        self.client = None
        try:
            peer = self.server.hear()
            self.client = Lines(["drive", *arguments], env)
            self.client.say(peer)
            self.client.hear()
        except (RuntimeError, OSError):
            self.end()
            raise
        self.bytes = size * count

    def rate(self):
        self.client.say("go")
        return self.bytes / self.client.hear()

    def end(self):
        for process in (self.server, self.client):
            if process:
                process.end()


class Perftest:
    """ucx_perftest's one-sided puts; it says its own rate."""

    def __init__(self, size, count, env, *extra):
        self.program = f"{site.getsitepackages()[0]}/libucx/bin/ucx_perftest"
        os.chmod(self.program, 0o755)
        self.size, self.count, self.env, self.extra = size, count, env, extra

    def rate(self):
        server = subprocess.Popen([self.program, "-p", str(PORT)], env=self.env, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL)
        try:
            time.sleep(0.5)
            command = [self.program, "127.0.0.1", "-p", str(PORT), "-f", "-t", "ucp_put_bw", "-s", str(self.size),
                       "-n", str(self.count), "-w", str(max(self.count // 10, 10)), *self.extra]
            result = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120)
            numbers = re.findall(r"[\d.]+", result.stdout.strip().splitlines()[-1]) if result.stdout.strip() else []
            if result.returncode or len(numbers) < 7:
                raise RuntimeError((result.stderr or result.stdout).strip().splitlines()[-1])
            # ..., average and overall MB/s, average and overall messages a second.
            return float(numbers[-3]) * 2**20
        finally:
            server.kill()
            server.wait()

    def end(self):
        pass


def baton(program, shape, tokens, env):
    """One round of Baton's own benchmark: name -> bytes a second. Over UCX with the library the peers use, and TCP only."""
    command = [program, "bench", "transfer", "--json", "--shape", shape, "--tokens", str(tokens), "--rounds", "1",
               "--round-trips", "1", "--no-verify", "--transport", "shm,tcp,ucx",
               "--ucx-library", f"{site.getsitepackages()[0]}/libucx/lib",
               "--ucx-options", f"TLS={env['UCX_TLS']} NET_DEVICES={env['UCX_NET_DEVICES']}"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {result.stderr.strip()}")
    return {name(row): row["bytes_per_second"]["median"] for row in json.loads(result.stdout)["bandwidth"]}


def name(row):
    """What the table calls a way of Baton's."""
    if row["way"] != "handoff":
        return {"memcpy": "memcpy", "plain-tcp": "plain TCP"}[row["way"]]
    handoff = {"shm": "shm handoff", "tcp": "TCP handoff", "ucx": "UCX handoff"}[row["transport"]]
    return handoff if row["verified"] else f"{handoff}, unverified"


def attempt(make, problems, name):
    try:
        return make()
    except Exception as error:  # Whatever a peer's library raises is a reason.
        problems[name] = str(error) or type(error).__name__
        return None


def once(make):
    peer = make()
    try:
        return peer.rate()
    finally:
        peer.end()


def measure(options, shape):
    layers, heads, dim = SHAPES[shape]
    blocks = -(-options.tokens // 16)
    size, count = 2 * heads * 16 * dim * 2, blocks * layers
    env, problems, runs = environment(options.venv), {}, {}
    big = 1 << 20
    makers = {
        f"UCX put, {size >> 10} KiB each": lambda: Perftest(size, count, env),
        "UCX put, 1 MiB each": lambda: Perftest(big, max(size * count // big, 1), env),
        # What a worker needs to notice a dead peer, and so what Baton's own row is to be compared with.
        "UCX put, 1 MiB, peer errors": lambda: Perftest(big, max(size * count // big, 1), env, "-e"),
        "NIXL write (UCX)": lambda: Pair("nixl", size, count, env),
        "Mooncake write": lambda: Pair("mooncake", size, count, env),
    }
    for _ in range(options.rounds):
        for name, rate in baton(options.baton, shape, options.tokens, env).items():
            runs.setdefault(name, []).append(rate)
        for name, make in makers.items():
            if name not in problems:
                runs.setdefault(name, []).append(attempt(lambda: once(make), problems, name))
    print(f"\n{options.tokens} tokens of {shape}: {count} pieces of {size} bytes, medians of {options.rounds} rounds\n")
    table(runs, problems, list(makers))


def table(runs, problems, peers):
    median = {name: statistics.median(rates) for name, rates in runs.items() if name not in problems}

    def ratio(name, base):
        """Of the two in each round, so that a machine that slows down does so for both; then the median."""
        return statistics.median(a / b for a, b in zip(runs[name], runs[base]))

    def beside(name):
        if name in peers:
            return f"TCP handoff: {ratio('TCP handoff', name):.1f} times that"
        base = {"s": "memcpy", "T": "plain TCP", "U": "UCX put, 1 MiB, peer errors"}.get(name[0])
        if base in problems or base not in median:
            return ""
        return f"{ratio(name, base):.2f} of {base}" if base else ""

    names = [name for name in runs if name not in peers] + peers
    print(f"| {'what':<27} | GB/s (lowest to highest) | ratio                               |")
    print(f"| {'-' * 27} | {'-' * 24} | {'-' * 35} |")
    for name in names:
        if name in problems:
            print(f"| {name:<27} | does not run here: {problems[name]} | |")
            continue
        rates = runs[name]
        cell = f"{median[name] / 1e9:.2f} ({min(rates) / 1e9:.2f} to {max(rates) / 1e9:.2f})"
        print(f"| {name:<27} | {cell:<24} | {beside(name):<35} |")


def main():
    if len(sys.argv) > 1 and sys.argv[1] in ("serve", "drive"):
        role, library, size, count = sys.argv[1:]
        return (serve if role == "serve" else drive)(library, int(size), int(count))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--baton", default="target/release/baton")
    parser.add_argument("--venv", default="target/bench-venv", type=os.path.abspath)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for shape in options.shape or SHAPES:
        measure(options, shape)


if __name__ == "__main__":
    main()
