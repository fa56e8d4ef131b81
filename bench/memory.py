#!/usr/bin/env python3
"""How much memory the processes of `baton up` take, how long they take to start, and how fast they then decode.

    bench/memory.py --baton target/release/baton [--models smollm2,qwen] [--rounds N] [--ways LIST]

Starts `baton up` with a prefill and a decode worker (`split`) and with one worker that does both (`one`), in turn:

    own    each worker packs its own weights (--packed-weights 0B)
    first  the first start that keeps packed weights: there are none yet
    next   a start that finds them
    cold   the same, after the model and the packed weights were dropped from the page cache; `own-cold`: `own` after the model was

`start` is the time until `baton up` says that the cluster is ready. Then a prompt is answered, so that each worker has read its weights. `token` is the
median time between two tokens of the answer. Then the kernel is asked for each process:

    PSS      all memory that it has mapped and touched, where memory that N processes share counts as 1/N: the sum counts every page once
    RSS      the same, but shared memory counts in full
    private  what no other process has mapped

Figures are medians of the rounds. Every core should be idle.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time

from cluster import Cluster, random_ids

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORKERS = {"split": [], "one": ["--aggregated"]}
MIB = 2**20
# Tokens of the answer.
ANSWER = 128


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def drop(folder):
    """Drops all files below a folder from the page cache. No process may have them mapped."""
    os.sync()
    for path in files(folder):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def load(folder):
    """Reads all files below a folder into the page cache."""
    for path in files(folder):
        with path.open("rb") as file:
            while file.read(8 * MIB):
                pass


def memory(pid):
    """Bytes of a process: PSS, RSS and private memory."""
    lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    of = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":", 1) for line in lines)}
    return of["Pss"], of["Rss"], of["Private_Clean"] + of["Private_Dirty"]


def processes(cluster):
    """Name → process id, of `up` and of each process that it has started."""
    own = cluster.process.pid
    children = pathlib.Path(f"/proc/{own}/task/{own}/children").read_text().split()
    name = lambda pid: pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1].decode()
    return {name(pid): int(pid) for pid in [str(own), *children]}


def answer(cluster):
    """The median time between two tokens of an answer."""
    path, body = cluster.completion(random_ids(64, 1), ANSWER)
    times = []
    for line in cluster.request("POST", path, body):
        if line.startswith(b"data: {"):
            times += [time.perf_counter()] * cluster.tokens(json.loads(line[6:]))
    return statistics.median(b - a for a, b in zip(times, times[1:]))


def measure(options, model, workers, way, cache):
    """Seconds until the cluster is ready, seconds between tokens, and the memory of each process."""
    if way == "first":
        shutil.rmtree(cache / "packed", ignore_errors=True)
    for folder in (model.parent, cache):
        (drop if "cold" in way else load)(folder)
    kept = ["--packed-weights", "0B"] if way.startswith("own") else []
    begun = time.perf_counter()
    cluster = Cluster(options.baton, str(model), [*WORKERS[workers], "--model-cache", str(cache), *kept])
    start = time.perf_counter() - begun
    try:
        token = answer(cluster)
        return start, token, {name: memory(pid) for name, pid in processes(cluster).items()}
    finally:
        cluster.close()


def tell(name, workers, way, rounds):
    def median(of, digits=0, unit=1.0):
        return f"{statistics.median(map(of, rounds)) / unit:.{digits}f}"

    def total(kind):
        return median(lambda r: sum(figures[kind] for figures in r[2].values()), unit=MIB)

    starts = [start for start, _, _ in rounds]
    each = ", ".join(f"{process} {median(lambda r: r[2][process][0], unit=MIB)}" for process in rounds[0][2])
    start = f"{statistics.median(starts):.2f} ({min(starts):.2f} to {max(starts):.2f})"
    token = median(lambda r: r[1], 2, 1e-3)
    print(f"| {name}, {workers}, {way} | {start} | {total(0)} | {total(1)} | {total(2)} | {token} | {each} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baton", default=ROOT / "target/release/baton", type=pathlib.Path)
    parser.add_argument("--models", default="smollm2", type=lambda text: text.split(","), help="names or files, with commas")
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--ways", default="own,first,next,own-cold,cold", type=lambda text: text.split(","))
    options = parser.parse_args()
    print("| | start, s | PSS of all, MiB | RSS | private | token, ms | PSS of each |\n| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for name in options.models:
        # The last line `baton model pull` prints is where the file lies.
        pull = [options.baton, "model", "pull", name]
        model = pathlib.Path(subprocess.run(pull, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
        rounds = {}
        with tempfile.TemporaryDirectory(dir=ROOT / "target") as cache:
            for _ in range(options.rounds):
                for workers in WORKERS:
                    for way in options.ways:
                        taken = measure(options, model, workers, way, pathlib.Path(cache))
                        rounds.setdefault((workers, way), []).append(taken)
        for (workers, way), taken in rounds.items():
            tell(name, workers, way, taken)


if __name__ == "__main__":
    main()
