#!/usr/bin/env python3
"""Runs two benchmark commands in turn, A B A B, and prints medians and their ratios.

    bench/compare.py --a "target/release/baton bench engine --json --model m.gguf --threads 2" \\
                     --b "target/bench-venv/bin/python bench/llama_cpp.py m.gguf --threads 2"

Each command prints JSON lines {"metric", "value", "unit"} on stdout; other lines are ignored. Larger values are better.
Before every run the machine must have been idle for a second; see README.md for why. A third command, run once, may say in lines with a
"ceiling" beside the metric what the machine could reach at best; the table then says how much of that A does reach.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time


def busy_cores(seconds=1.0):
    """Cores' worth of work that the machine did over the last moment."""
    def ticks():
        with open("/proc/stat") as file:
            user, nice, system, idle, iowait, *rest = map(int, file.readline().split()[1:])
        return user + nice + system + sum(rest[:3])
    before = ticks()
    time.sleep(seconds)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds


def wait_until_idle(limit, patience):
    """True when the machine is idle; False when it still is not after `patience` seconds."""
    deadline = time.monotonic() + patience
    while (busy := busy_cores()) > limit:
        if time.monotonic() > deadline:
            print(f"warning: other processes keep {busy:.2f} cores busy; figures are not to be trusted", file=sys.stderr)
            return False
    return True


def lines(command):
    """What a command prints as JSON."""
    result = subprocess.run(shlex.split(command), stdout=subprocess.PIPE, text=True)
    if result.returncode:
        raise SystemExit(f"{command!r} ended with {result.returncode}")
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def run(command):
    """One run's values: metric -> (value, unit)."""
    values = {entry["metric"]: (float(entry["value"]), entry["unit"]) for entry in lines(command) if "metric" in entry}
    if not values:
        raise SystemExit(f"{command!r} printed no metric")
    return values


def summary(runs, metric):
    """Median, lowest, highest of a metric over runs, and its unit; None when a run lacks it."""
    if any(metric not in r for r in runs):
        return None
    values = [r[metric][0] for r in runs]
    return statistics.median(values), min(values), max(values), runs[0][metric][1]


def table(runs, names, ceilings):
    """Rows of text and of data, a metric each, in the order of the first run of A."""
    rows, data = [], []
    metrics = list(dict.fromkeys(m for side in runs for r in side for m in r))
    for metric in metrics:
        a, b = (summary(side, metric) for side in runs)
        cell = lambda s: f"{s[0]:.1f} ({s[1]:.1f} to {s[2]:.1f})" if s else "none"
        ratio = a[0] / b[0] if a and b and b[0] else None
        unit = (a or b or (None,) * 4)[3]
        ceiling = ceilings.get(metric)
        reached = a[0] / ceiling if a and ceiling else None
        rows.append([metric, cell(a), cell(b), f"{ratio:.2f}" if ratio is not None else "none", unit or ""])
        if ceilings:
            rows[-1].append(f"{reached:.0%} of {ceiling:.1f}" if reached else "none")
        data.append({"metric": metric, names[0]: a and a[0], names[1]: b and b[0], "ratio": ratio, "unit": unit,
                     "ceiling": ceiling})
    return rows, data


def print_table(head, rows):
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    line = lambda cells: "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths)) + " |"
    print("\n".join([line(head), line(["-" * w for w in widths]), *map(line, rows)]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--a", required=True, help="first command")
    parser.add_argument("--b", required=True, help="second command, the one to be measured against")
    parser.add_argument("--names", default="baton,llama.cpp", help="of the two, for the table")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each")
    parser.add_argument("--idle-limit", type=float, default=0.1, help="cores that others may keep busy")
    parser.add_argument("--idle-patience", type=float, default=120, help="seconds to wait for an idle machine")
    parser.add_argument("--ceilings", help="command that says what the machine could reach")
    parser.add_argument("--title", default="", help="of the table")
    parser.add_argument("--json", help="also append the table to this file, as one line")
    args = parser.parse_args()
    names = args.names.split(",")
    if len(names) != 2 or args.rounds < 1:
        parser.error("--names needs two names, --rounds at least 1")
    runs, idle = ([], []), True
    for number in range(args.rounds):
        for side, command in enumerate((args.a, args.b)):
            idle &= wait_until_idle(args.idle_limit, args.idle_patience)
            print(f"round {number + 1} of {args.rounds}: {names[side]}", file=sys.stderr, flush=True)
            runs[side].append(run(command))
    machine = []
    if args.ceilings:
        idle &= wait_until_idle(args.idle_limit, args.idle_patience)
        machine = lines(args.ceilings)
    ceilings = {entry["metric"]: entry["ceiling"] for entry in machine if "metric" in entry and entry.get("ceiling")}
    rows, data = table(runs, names, ceilings)
    if args.title:
        print(f"\n{args.title}\n")
    print_table(["metric", *names, "ratio", "unit", *([f"{names[0]} of its ceiling"] if ceilings else [])], rows)
    print(f"\nMedian (lowest to highest) of {args.rounds} alternating runs; ratio is {names[0]} / {names[1]}.")
    limits = [e for e in machine if str(e.get("metric", "")).startswith("ceiling_")]
    if limits:
        print("This machine at most: " + ", ".join(f"{e['metric'][8:]} {e['value']:.1f} {e['unit']}" for e in limits) + ".")
    if not idle:
        print("The machine was NOT idle: these figures mean nothing.")
    if args.json:
        with open(args.json, "a") as file:
            entry = {"title": args.title, "rounds": args.rounds, "idle": idle, "metrics": data, "machine": machine}
            print(json.dumps(entry), file=file)


if __name__ == "__main__":
    main()
