#!/usr/bin/env python3
"""What clients who mean harm do to the others of a router; usually by way of bench/router-hostile.

    bench/hostile.py --baton target/release/baton --tool target/release/examples/front_door [--only ATTACK,… | --streams 10000]

The router has one core. Workers that compute nothing, the attackers and a steady load of good clients share another, so part of what the good
clients lose is lost there; "other core" says how busy it is. Each attack runs as long as the loads of good clients. These go over HTTP, over one
gRPC connection that is older than the attack, and over a new gRPC connection for each request. Beside them the admin port is asked for /health ten
times a second, over a new connection each time and with a second of patience, as by Kubernetes.

With --streams so many are begun, a tenth of which is not read. It takes six minutes at most and ends with the count of the tokens that were lost.
"""

import argparse
import asyncio
import fcntl
import http.client
import json
import math
import multiprocessing
import os
import pathlib
import re
import resource
import socket
import statistics
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from attacks import ATTACKS, LEAST
from compare import print_table, wait_until_idle
from front_door import OTHER_CORE, ROUTER_CORE, Process, answers, core_times, free_port

# Seconds in which the streams of --streams begin, after which those begun first end, and after which one that has not ended has failed.
BEGIN, ANSWER, PATIENCE = 40, 200, 300
# Tokens of a stream come so many together, every two seconds.
BURST = 16


class Router:
    """A router with fake workers."""

    def __init__(self, options, pace, *settings):
        self.options, self.pace = options, pace
        self.http, self.grpc, self.internal, self.admin = (free_port() for _ in range(4))
        at = lambda port: f"127.0.0.1:{port}"
        command = [options.baton, "router", "--model", "random:tiny", "--http", at(self.http), "--grpc", at(self.grpc), "--internal", at(self.internal),
                   "--admin", at(self.admin), "--log", "error", *settings]
        self.router = Process(ROUTER_CORE, command)

    def __enter__(self):
        self.router.__enter__()
        answers(f"http://127.0.0.1:{self.http}/health")
        model = json.loads(answers(f"http://127.0.0.1:{self.admin}/cluster"))["model"]
        command = [self.options.tool, "workers", "--registry", f"http://127.0.0.1:{self.internal}", "--model", model, *self.pace]
        self.workers = Process(OTHER_CORE, command).__enter__()
        self.workers.says("registered")
        answers(f"http://127.0.0.1:{self.http}/ready")
        self.model = json.loads(answers(f"http://127.0.0.1:{self.http}/v1/models"))["data"][0]["id"]
        return self

    def __exit__(self, *ended):
        self.workers.__exit__(*ended)
        self.router.__exit__(*ended)

    def start_load(self, rate, tokens, *more, grpc=None):
        """Starts good clients: so many requests a second. `grpc`: over a connection that is `kept`, or each over a `new` one."""
        url = f"http://127.0.0.1:{self.grpc if grpc else self.http}"
        command = ["taskset", "-c", OTHER_CORE, self.options.tool, "load", "--url", url, "--model", self.model, "--prompt", "100"]
        command += ["--rate", str(rate), "--tokens", str(tokens), *more, *(["--grpc", grpc] if grpc else [])]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def load(self, rate, seconds, tokens):
        return result(self.start_load(rate, tokens, "--seconds", str(seconds)))

    def memory(self, what="VmRSS"):
        """Resident bytes of the router; with VmHWM the most it had since `forget_peak`."""
        status = pathlib.Path(f"/proc/{self.router.process.pid}/status").read_text()
        return int(re.search(what + r":\s+(\d+)", status)[1]) * 1024

    def forget_peak(self):
        pathlib.Path(f"/proc/{self.router.process.pid}/clear_refs").write_text("5")

    def running(self):
        """Answers in progress, as the router's own metrics say."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/metrics", timeout=30) as page:
            text = page.read().decode()
        return sum(int(float(n)) for n in re.findall(r"^baton_requests_in_flight(?:\{[^}]*\})? (\S+)$", text, re.M))


class Probes:
    """Asks for a page ten times a second, in a process of its own: the attackers keep this one busy."""

    def __init__(self, url):
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=probe, args=(url, theirs), daemon=True)
        self.process.start()

    def end(self):
        """How many were answered, how many not, and the p99 of the milliseconds of the answered."""
        self.pipe.send(None)
        times, failed = self.pipe.recv()
        self.process.join()
        return len(times), failed, sorted(times)[int(len(times) * 0.99)] * 1e3 if times else math.nan


def probe(url, pipe):
    times, failed = [], 0
    while not pipe.poll(0.1):
        begun = time.monotonic()
        try:
            with urllib.request.urlopen(url, timeout=1) as page:
                page.read()
            times.append(time.monotonic() - begun)
        except (OSError, http.client.HTTPException):
            failed += 1
    pipe.send((times, failed))


def result(load):
    """What a load reports at its end."""
    return json.loads(load.communicate()[0])


def at(load, what, share):
    """A percentile of a load; a dash if nothing came."""
    value = load[what][share]
    return "-" if value is None else f"{value:.0f}"


def of(load):
    return f"{load['requests'] - load['failed']} / {load['failed']}"


async def attacked(router, name, options):
    """Attacks; what came of it, and the good clients, which come a second later but for those whose connection is kept."""
    seconds = max(options.seconds, LEAST.get(name, 0))
    lasting = lambda seconds: ("--seconds", str(seconds), "--patience", "60")
    kept = router.start_load(options.rate / 2, 64, *lasting(seconds + 1), grpc="kept")
    await asyncio.sleep(0.5)
    task = asyncio.create_task(ATTACKS[name](router, seconds + 1) if name in ATTACKS else asyncio.sleep(seconds + 1, ""))
    await asyncio.sleep(1)
    loads = router.start_load(options.rate, 64, *lasting(seconds)), kept, router.start_load(options.rate / 2, 64, *lasting(seconds), grpc="new")
    return await task, loads


def attacks(options):
    """Each attack beside good clients; a row each."""
    rows = []
    pace = ["--first-ms", "20", "--step-ms", "10", "--burst", "4"]
    for name in options.only or ["none", *ATTACKS]:
        with Router(options, pace) as router:
            router.load(50, 1, 64)
            wait_until_idle(0.15, options.idle_patience)
            router.forget_peak()
            before, other = router.memory(), core_times(OTHER_CORE)
            probes = Probes(f"http://127.0.0.1:{router.admin}/health")
            answer, loads = asyncio.run(attacked(router, name, options))
            healthy, sick, late = probes.end()
            good, kept, new = map(result, loads)
            busy, everything = (after - since for after, since in zip(core_times(OTHER_CORE), other))
            peak = router.memory("VmHWM")
            time.sleep(2)
            row = [name, answer, of(good), f"{at(good, 'first_ms', 'p50')} / {at(good, 'first_ms', 'p99')}", at(good, "last_ms", "p99")]
            row += [f"{of(load)}, {at(load, 'first_ms', 'p99')}" for load in (kept, new)] + [f"{healthy} / {sick}, {late:.0f}"]
            rows.append([*row, f"{before / 1e6:.0f} / {peak / 1e6:.0f}", str(router.running()), f"{busy / everything:.0%}"])
            print(rows[-1], *(load["error"] for load in (good, kept, new) if load["error"]), file=sys.stderr, flush=True)
    print_table(["attack", "what came of it", "HTTP: right / failed", "first token p50 / p99, ms", "end p99", "gRPC, kept: right / failed, first token p99",
                 "gRPC, new", "/health: right / failed, p99 ms", "memory before / at most, MB", "running after", "other core"], rows)


async def stop_reading(router, count, tokens):
    """Opens streams and reads nothing of them."""
    body = json.dumps({"model": router.model, "prompt": [100] * 20, "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    sockets = []
    for _ in range(count):
        stalled = socket.socket()
        # Little room in the system's buffers, as between machines: loopback's segments of 64 KB would get megabytes.
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        stalled.connect(("127.0.0.1", router.http))
        stalled.sendall(request)
        sockets.append(stalled)
        await asyncio.sleep(0.002)
    return sockets


class Watch:
    """Looks every second at what sockets that are not read hold, and at how many answers are in progress."""

    def __init__(self, router, sockets):
        self.router, self.sockets = router, sockets
        # Of each socket the bytes it holds, and since when.
        self.held, self.seen, self.over = [(-1, 0.0)] * len(sockets), [(time.monotonic(), router.running())], threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)
        self.thread.start()

    def look(self):
        while not self.over.wait(1):
            now = time.monotonic()
            for number, each in enumerate(self.sockets):
                count = struct.unpack("i", fcntl.ioctl(each, termios.FIONREAD, bytes(4)))[0]
                if count != self.held[number][0]:
                    self.held[number] = (count, now)
            self.seen.append((now, self.router.running()))

    def running(self):
        return self.seen[-1][1]

    def end(self, most):
        """Seconds from when the nth socket was full to when the nth place was back, for each n."""
        self.over.set()
        self.thread.join()
        full = sorted(since for _, since in self.held)
        back = (next((when for when, running in self.seen if running < most - number), math.inf) for number in range(len(full)))
        return [then - since for since, then in zip(full, back)]


def streams(options):
    """Many streams at once, a tenth of which is not read."""
    stalled = options.streams // 10
    reading, tokens = options.streams - stalled, BURST * ANSWER // 2
    settings = ["--max-inflight", str(2 * options.streams), "--max-connections", str(2 * options.streams), "--send-timeout", "10s", "--request-timeout", "1h"]
    with Router(options, ["--first-ms", "20", "--step-ms", str(2000 / BURST), "--burst", str(BURST)], *settings) as router:
        router.load(50, 1, 1)
        before, start = router.memory(), time.monotonic()
        tell = lambda what: print(f"{time.monotonic() - start:.0f} s: {what}, {router.running()} in progress", file=sys.stderr, flush=True)
        load = router.start_load(reading / BEGIN, tokens, "--count", str(reading), "--patience", str(PATIENCE))
        while (held := router.running()) < reading and time.monotonic() < start + 1.5 * BEGIN:
            tell("streams begin")
            time.sleep(min(5, max(0.5, start + BEGIN - time.monotonic())))
        memory = router.memory()
        print(f"{held} of {reading} streams that are read, {(memory - before) / max(held, 1) / 1024:.1f} KiB of the router's memory each", flush=True)
        alone, beside = [], []
        first_tokens(router, lambda: len(alone) < 6, alone, tell, "new requests before")
        sockets = asyncio.run(stop_reading(router, stalled, 60_000))
        most, begun, watch = router.running(), time.monotonic(), Watch(router, sockets)
        # Before the streams that are read end, too.
        last = start + ANSWER - 10
        first_tokens(router, lambda: watch.running() > most - stalled and time.monotonic() < last, beside, tell, "new requests beside the unread")
        print(f"{most} of {options.streams} streams at once, {stalled} of which are not read: back to {watch.running()} after {time.monotonic() - begun:.0f} s")
        late = watch.end(most)
        print(f"a place came back {statistics.median(late):.0f} s (median) and at most {max(late):.0f} s after a client's system had taken its last byte")
        for when, told in ("meanwhile", beside), ("before", alone):
            print(f"first token of new requests {when}, p99 of a load of 5 s: {statistics.median(told):.0f} ms (median of {len(told)} loads), "
                  f"{max(told):.0f} ms (worst)")
        print(f"memory: {router.memory() / 1e6:.0f} MB", flush=True)
        while load.poll() is None:
            tell("streams end")
            time.sleep(10)
        lost(result(load))
        del sockets


def first_tokens(router, more, told, tell, what):
    """Adds the p99s of the first token of new requests, by loads of 5 s, while there is to be one more."""
    while more():
        tell(what)
        told.append(router.load(10, 5, 1)["first_ms"]["p99"])


def lost(load):
    """Prints what became of the streams that were read."""
    print(f"of {load['requests']} streams that were read {load['failed']} failed; of their {load['tokens']:,} tokens "
          f"{load['tokens'] - load['tokens_came']:,} were lost")
    if load["error"]:
        print(f"the first that failed: {load['error'][:300]}")
    print(f"longest pauses of the others, where the workers' are 2,000 ms: p50 {at(load, 'pause_ms', 'p50')} ms, p99 {at(load, 'pause_ms', 'p99')} ms")


def allow_files(count):
    """Lets this process, and each that it starts, have so many files and sockets open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(count, most),) * 2)
    except (ValueError, OSError):
        raise SystemExit(f"a process may have {most} files open, and needs {count}: raise the limit with `ulimit -Hn {count}`, as root")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baton", required=True, help="the program to measure")
    parser.add_argument("--tool", required=True, help="the built example front_door")
    parser.add_argument("--only", type=lambda words: words.split(","), help=f"some of: none, {', '.join(ATTACKS)}; with commas")
    parser.add_argument("--seconds", type=float, default=20, help="of an attack; slow ones take longer than the router's limit of 10 s in any case")
    parser.add_argument("--rate", type=float, default=50, help="requests of good clients a second over HTTP; over gRPC half as many by each way")
    parser.add_argument("--idle-patience", type=float, default=60, help="seconds to wait for an idle machine")
    parser.add_argument("--streams", type=int, help="instead: so many streams at once, a tenth of which is not read")
    options = parser.parse_args()
    # Each stream has a socket at the client's end and one in the router; 4,096 silent ones at four ports.
    allow_files((options.streams or 4 * 4096) + 1024)
    os.sched_setaffinity(0, {int(OTHER_CORE)})
    streams(options) if options.streams else attacks(options)


if __name__ == "__main__":
    main()
