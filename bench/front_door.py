#!/usr/bin/env python3
"""What a router adds to a request and what it costs, one router on one core; usually by way of bench/router.

    bench/front_door.py --baton target/release/baton --tool target/release/examples/front_door

The workers compute nothing. They and the load run on another core, as the example `front_door` of the router crate. Each round measures every
router in turn, and first the load against a worker without a router: what is added is the difference of the percentiles. CPU is the
router's own, user and system time. "other core" says how busy workers and load are: near 100% they, too, add latency.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from compare import print_table, wait_until_idle

ROUTER_CORE, OTHER_CORE = "0", "1"
# A router that adds more to the time to a first token is overloaded.
LATE_MS = 5
# Short answers have this part of the tokens.
SHORT = 8
TICKS = os.sysconf("SC_CLK_TCK")


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Process:
    """A program on one core, ended at the end of its `with`."""

    def __init__(self, core, command):
        self.command = ["taskset", "-c", core, *command]

    def __enter__(self):
        self.log = open("/dev/null", "w") if not os.environ.get("BENCH_LOGS") else None
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=self.log, text=True, start_new_session=True)
        return self

    def __exit__(self, *_):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def says(self, word):
        """Waits for a line."""
        for line in self.process.stdout:
            if word in line:
                return
        raise SystemExit(f"{shlex.join(self.command)} ended before it said {word!r}")

    def cpu(self):
        """Seconds of CPU, of the process and all below it."""
        group = subprocess.run(["pgrep", "-g", str(self.process.pid)], stdout=subprocess.PIPE, text=True).stdout.split()
        total = 0
        for pid in group:
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
        return total / TICKS


def answers(url, patience=60):
    """Waits until a URL answers with 200; returns what it says."""
    until = time.monotonic() + patience
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return answer.read()
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > until:
                raise SystemExit(f"{url} does not answer: {error}")
            time.sleep(0.1)


def core_times(core):
    """Ticks that a core has been busy, and all its ticks."""
    line = next(line for line in open("/proc/stat") if line.startswith(f"cpu{core} "))
    ticks = [int(word) for word in line.split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def pace(options):
    return ["--first-ms", str(options.first_ms), "--step-ms", str(options.step_ms), "--burst", str(options.burst)]


def load(options, url, model, text=False):
    command = [options.tool, "load", "--url", url, "--model", model, "--rate", str(options.rate), "--seconds", str(options.seconds),
               "--prompt", str(options.prompt), "--tokens", str(options.tokens)]
    command += ["--text", str(text).lower()] if options.shared is None else ["--shared", str(options.shared)]
    done = subprocess.run(["taskset", "-c", OTHER_CORE, *command], stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout)
    if result["failed"]:
        print(f"{url}: {result['failed']} of {result['requests']} failed, the first: {str(result['error'])[:300]}", file=sys.stderr)
    return result


def measured(options, router, url, model, text=False):
    """Loads a router once to warm it up, then for the record, with its CPU, then with short answers, to tell what a token costs from what a
    request does."""
    load(argparse.Namespace(**{**vars(options), "seconds": 1, "rate": min(options.rate, 200)}), url, model, text)
    other = core_times(OTHER_CORE)
    result, cpu_us = cpu_us_a_request(options, router, url, model, text)
    busy, all_time = (after - since for after, since in zip(core_times(OTHER_CORE), other))
    short = argparse.Namespace(**{**vars(options), "tokens": max(options.tokens // SHORT, 1)})
    _, short_us = cpu_us_a_request(short, router, url, model, text)
    more_us = (cpu_us - short_us) / max(options.tokens - short.tokens, 1)
    return {**result, "cpu_us_a_token": cpu_us / options.tokens, "cpu_us_a_token_more": more_us,
            "cpu_us_a_request": short_us - short.tokens * more_us, "other_core": busy / all_time}


def cpu_us_a_request(options, router, url, model, text):
    """What a load reports, and the router's CPU for each of its requests, with all their tokens."""
    before = router.cpu()
    result = load(options, url, model, text)
    return result, (router.cpu() - before) / max(result["requests"] - result["failed"], 1) * 1e6


def direct(options):
    port = free_port()
    with Process(OTHER_CORE, [options.tool, "backend", "--listen", f"127.0.0.1:{port}", *pace(options)]) as backend:
        backend.says("listening")
        return load(options, f"http://127.0.0.1:{port}", "tiny")


def baton(binary, flags=(), watched=False):
    """`watched`: a page of it is open."""
    def run(options):
        http, grpc, internal, admin = (free_port() for _ in range(4))
        url = f"http://127.0.0.1:{http}"
        router = [binary, "router", "--model", options.model, "--http", f"127.0.0.1:{http}", "--grpc", f"127.0.0.1:{grpc}",
                  "--internal", f"127.0.0.1:{internal}", "--admin", f"127.0.0.1:{admin}", "--log", "error", "--max-inflight", "65536", "--max-connections", "65536", *flags]
        with Process(ROUTER_CORE, router) as router:
            answers(f"{url}/health")
            model = json.loads(answers(f"http://127.0.0.1:{admin}/cluster"))["model"]
            workers = [options.tool, "workers", "--registry", f"http://127.0.0.1:{internal}", "--model", model, *pace(options)]
            with Process(OTHER_CORE, workers) as workers:
                workers.says("registered")
                answers(f"{url}/ready")
                served = json.loads(answers(f"{url}/v1/models"))["data"][0]["id"]
                with open_page(f"http://127.0.0.1:{admin}") if watched else contextlib.nullcontext():
                    return measured(options, router, url, served)
    return run


@contextlib.contextmanager
def open_page(admin):
    """Reads what a live page reads, all the time."""
    with urllib.request.urlopen(f"{admin}/page/events", timeout=60) as events:
        reader = threading.Thread(target=lambda: [None for _ in events], daemon=True)
        reader.start()
        yield
        if not reader.is_alive():
            raise SystemExit("the page's events ended")
        events.fp.raw._sock.shutdown(socket.SHUT_RDWR)
        reader.join()


def traced(binary, collector, share):
    """Sends traces of a share of its requests to a collector on the other core."""
    def run(options):
        port, folder = free_port(), pathlib.Path(tempfile.mkdtemp())
        try:
            (folder / "collector.yaml").write_text(
                f"receivers: {{otlp: {{protocols: {{grpc: {{endpoint: '127.0.0.1:{port}'}}}}}}}}\nexporters: {{nop: }}\n"
                "service: {telemetry: {metrics: {level: none}}, pipelines: {traces: {receivers: [otlp], exporters: [nop]}}}\n")
            with Process(OTHER_CORE, [collector, "--config", str(folder / "collector.yaml")]):
                until = time.monotonic() + 60
                while socket.socket().connect_ex(("127.0.0.1", port)):
                    if time.monotonic() > until:
                        raise SystemExit(f"{collector} does not listen")
                    time.sleep(0.1)
                return baton(binary, ["--otlp-endpoint", f"http://127.0.0.1:{port}", "--otlp-sample", str(share)])(options)
        finally:
            shutil.rmtree(folder)
    return run


def relay(options):
    """Only copies bytes: what no router that writes each token to its client can do without."""
    return passes_through(f"{options.tool} relay --listen 127.0.0.1:{{port}} --to {{addresses}}", text=False)(options)


def passes_through(command, text):
    """A router that passes HTTP through. `command` has {port}, {backends} or {addresses}, and {free}, another free port."""
    def run(options):
        port, ports = free_port(), [free_port() for _ in range(2)]
        backends = [Process(OTHER_CORE, [options.tool, "backend", "--listen", f"127.0.0.1:{p}", *pace(options)]) for p in ports]
        with backends[0] as first, backends[1] as second:
            first.says("listening"), second.says("listening")
            addresses = [f"127.0.0.1:{p}" for p in ports]
            words = command.format(port=port, free=free_port(), backends=" ".join(f"http://{address}" for address in addresses),
                                   addresses=",".join(addresses))
            with Process(ROUTER_CORE, shlex.split(words)) as router:
                answers(f"http://127.0.0.1:{port}/health")
                return measured(options, router, f"http://127.0.0.1:{port}", "tiny", text)
    return run


def dynamo(python):
    """Dynamo's frontend, which tokenises, with its mocker as workers. Their pace is the mocker's own, so only the frontend's CPU compares."""
    def run(options):
        folder = pathlib.Path(tempfile.mkdtemp())
        try:
            subprocess.run([python, pathlib.Path(__file__).parent / "gguf_directory.py", options.dynamo_model, folder / "model"], check=True)
            environment = ["env", f"DYN_FILE_KV={folder / 'kv'}", "HF_HUB_OFFLINE=1", "DYN_LOG=error", python, "-m"]
            planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
            http = free_port()
            frontend = [*environment, "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(http), "--router-mode", "round-robin", *planes]
            mocker = [*environment, "dynamo.mocker", "--model-path", str(folder / "model"), "--model-name", "tiny", "--num-workers", "2",
                      "--no-enable-prefix-caching", "--speedup-ratio", "20", *planes]
            with Process(ROUTER_CORE, frontend) as router, Process(OTHER_CORE, mocker):
                url = f"http://127.0.0.1:{http}"
                until = time.monotonic() + 120
                while b"tiny" not in answers(f"{url}/v1/models"):
                    if time.monotonic() > until:
                        raise SystemExit("Dynamo's mocker does not register")
                    time.sleep(0.2)
                return measured(options, router, url, "tiny")
        finally:
            shutil.rmtree(folder)
    return run


def others(options):
    """What stands beside it."""
    routers = {name: baton(program) for name, _, program in (other.partition("=") for other in options.other)}
    for peers, text in ((options.peer, False), (options.text_peer, True)):
        routers |= {name: passes_through(command, text) for name, _, command in (peer.partition("=") for peer in peers)}
    if options.dynamo:
        routers["dynamo"] = dynamo(options.dynamo)
    return {**routers, "bytes only": relay}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baton", required=True, help="the program to measure")
    parser.add_argument("--tool", required=True, help="the built example front_door")
    parser.add_argument("--other", action="append", default=[], metavar="NAME=PROGRAM", help="another Baton beside it")
    parser.add_argument("--seen", metavar="COLLECTOR", help="only what it costs to see it: with a page open, and with traces of 1%% and of all requests "
                        "sent to this OpenTelemetry collector, which tests/traces/run builds as target/otelcol/otelcol")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND",
                        help="a router that passes HTTP through; {port}, {backends} and {free} in the command are filled in")
    parser.add_argument("--text-peer", action="append", default=[], metavar="NAME=COMMAND",
                        help="the same, one that takes no token ids: its prompts are texts of as many bytes")
    parser.add_argument("--dynamo", metavar="PYTHON", help="a Python that has ai-dynamo: its frontend, with its mocker, is measured, too")
    parser.add_argument("--dynamo-model", metavar="GGUF", help="whose byte-level tokenizer it gets")
    parser.add_argument("--model", default="random:tiny", help="whose tokenizer and template the router reads")
    parser.add_argument("--rates", default="1000", help="requests a second, with commas")
    parser.add_argument("--bursts", default="1,4", help="tokens of a request that are ready together, with commas")
    parser.add_argument("--shared", help="prompts are texts, of as many words as --prompt says; shares of them, with commas, that begin alike")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--prompt", type=int, default=1000, help="token ids")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--first-ms", type=float, default=20)
    parser.add_argument("--step-ms", type=float, default=10)
    options = parser.parse_args()
    routers = {"baton": baton(options.baton)}
    if options.seen:
        routers["page open"] = baton(options.baton, watched=True)
        routers |= {f"traces of {share:.0%}": traced(options.baton, options.seen, share) for share in (0.01, 1)}
    else:
        routers |= others(options)
    rates, bursts = list(map(float, options.rates.split(","))), list(map(int, options.bursts.split(",")))
    shares = options.shared.split(",") if options.shared else [None]
    rows, held = [], {}
    for rate, burst, shared in itertools.product(rates, bursts, shares):
        case = argparse.Namespace(**{**vars(options), "rate": rate, "burst": burst, "shared": shared})
        results = {name: [] for name in routers}
        for number in range(options.rounds):
            wait_until_idle(0.15, 120)
            print(f"{rate:.0f} requests/s, bursts of {burst}, shared {shared or '-'}, round {number + 1}", file=sys.stderr, flush=True)
            alone = direct(case)
            for name, run in routers.items():
                results[name].append((run(case), alone))
        for name, runs in results.items():
            row = figures(runs)
            rows.append([f"{rate:.0f}", str(burst), shared or "-", name, *row])
            # A run takes long, and may be cut off.
            print("  ".join(rows[-1]), file=sys.stderr, flush=True)
            if float(row[4]) < LATE_MS and row[-1] == "0":
                held[name, burst, shared] = max(rate, held.get((name, burst, shared), 0))
    print_table(["requests/s", "burst", "shared", "router", "CPU, µs a token", "of it a request", "and a token more", "first token p50, ms added", "p99", "end p50, ms added", "p99",
                 "other core", "failed"], rows)
    if len(rates) > 1:
        print(f"\nHighest of these rates at which the first token's p99 is under {LATE_MS} ms more, and nothing fails:")
        for burst, shared, name in itertools.product(bursts, shares, routers):
            print(f"  bursts of {burst}, shared {shared or '-'}, {name}: {held.get((name, burst, shared), 0):.0f}/s")
    what = "words" if options.shared else "token ids"
    print(f"\nMedians of {options.rounds} rounds; prompts of {options.prompt} {what}, {options.tokens} tokens out.")


def figures(runs):
    median = lambda values: statistics.median(list(values))
    added = lambda what, at: f"{median((own[what][at] or 0) - (alone[what][at] or 0) for own, alone in runs):.2f}"
    cpu = [f"{median(own[what] for own, _ in runs):.2f}" for what in ("cpu_us_a_token", "cpu_us_a_request", "cpu_us_a_token_more")]
    return [*cpu, added("first_ms", "p50"), added("first_ms", "p99"), added("last_ms", "p50"), added("last_ms", "p99"),
            f"{median(own['other_core'] for own, _ in runs):.0%}", str(sum(own["failed"] for own, _ in runs))]


if __name__ == "__main__":
    main()
