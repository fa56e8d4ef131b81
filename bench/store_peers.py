#!/usr/bin/env python3
"""Baton's KV store beside LMCache's back ends and Mooncake's store: the same blocks, in turn, and one table of medians and ratios.

    bench/store --rounds 5 --directory /path/of/the/disk

A block is 16 tokens of Llama-3.2-1B, 512 KiB. Put copies it out of a pool of 256 blocks, `[layer][block]` as a worker's is, into the store; get
copies it from the store into another pool. Host memory is one thread, with as many blocks for everybody; the disk has `--threads`. Baton digests
what it puts and verifies what it gets; the peers verify nothing. A peer that does not run says why in its row.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

LAYERS, ROW, SLOTS, POOL = 16, 8 * 64, 16, 256
PIECE = 2 * SLOTS * ROW * 2
BLOCK = LAYERS * PIECE
# Blocks in host memory, put once before the time is taken.
HOST = 2 * POOL
# Objects in flight to and from the disk, and blocks of one call of Mooncake.
STAGED = 64
MASTER, ADMIN = 15051, 15052
# Seconds for a peer's round.
PATIENCE = 300
PEERS = {"lmcache-16": "LMCache, chunks of 16 tokens", "lmcache-256": "LMCache, chunks of 256 tokens", "mooncake": "Mooncake's store"}


def environment(venv):
    """Libraries that the wheels and fio need; nothing is reported to a peer's makers."""
    debian = [f"{venv}/deb/{path}/x86_64-linux-gnu" for path in ("usr/lib", "lib")]
    libraries = [*debian, f"{debian[0]}/ceph", f"{venv}/stand-ins"]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries), "PATH": f"{os.environ['PATH']}:{venv}/deb/usr/bin",
            "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR", "MC_STORE_MEMCPY": "1", "GLOG_minloglevel": "3",
            # Mooncake writes a file when it has that many objects for it.
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1", "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "16"}


def speed(blocks, work):
    begun = time.perf_counter()
    work()
    return blocks * BLOCK / 1e9 / (time.perf_counter() - begun)


class Lmcache:
    """Its back ends, called as its engine does. The copies are torch's, whole chunks: its own for CPUs go token by token."""

    def __init__(self, tokens, directory, blocks, threads):
        # Only needed for its codecs.
        sys.modules["transformers"] = type(sys)("transformers")
        sys.modules["transformers"].AutoConfig = sys.modules["transformers"].AutoTokenizer = None
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        torch.set_num_threads(1)
        self.torch, self.per, self.blocks, self.threads = torch, tokens // SLOTS, blocks, threads
        self.key = lambda name, at: CacheEngineKey("model", 1, 0, hash((name, at)), torch.float16)
        self.config = lambda **more: LMCacheEngineConfig.from_defaults(
            chunk_size=tokens, local_disk=directory, max_local_disk_size=2 * blocks * BLOCK / 2**30,
            extra_config={"use_odirect": True, "disk_io_threads": threads}, **more)
        self.metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.float16, (LAYERS, 2, tokens, 8, 64), chunk_size=tokens)
        self.shape = torch.Size((2, LAYERS, tokens, ROW))
        values = torch.randint(-2**15, 2**15, (LAYERS, POOL, 2, SLOTS, ROW), dtype=torch.int16)
        self.pool, self.target = values.view(torch.float16), torch.ones_like(values).view(torch.float16)

    def host_memory(self, objects, hot):
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        size = objects * self.per * BLOCK / 2**30
        return LocalCPUBackend(self.config(local_cpu=hot, max_local_cpu_size=size), self.metadata)

    def pages(self, pool, at):
        first = at * self.per % POOL
        return pool[:, first:first + self.per].permute(2, 0, 1, 3, 4)

    def fill(self, store, at):
        chunk = store.allocate(self.shape, self.torch.float16)
        chunk.tensor.view(2, LAYERS, self.per, SLOTS, ROW).copy_(self.pages(self.pool, at))
        return chunk

    def take(self, chunk, at):
        self.pages(self.target, at).copy_(chunk.tensor.view(2, LAYERS, self.per, SLOTS, ROW))
        chunk.ref_count_down()

    def check(self, chunks):
        for at in chunks:
            if not self.torch.equal(*(self.pages(pool, at).view(self.torch.int16) for pool in (self.pool, self.target))):
                raise RuntimeError("what came back is not what was put")

    def host(self):
        """Put and get, GB/s."""
        store, chunks = self.host_memory(HOST // self.per, True), range(HOST // self.per)

        def put(name):
            for at in chunks:
                chunk = self.fill(store, at)
                store.submit_put_task(self.key(name, at), chunk)
                chunk.ref_count_down()

        def get():
            for at in chunks:
                self.take(store.get_blocking(self.key("measured", at)), at)
        put("first")
        speeds = speed(HOST, lambda: put("measured")), speed(HOST, get)
        self.check(chunks)
        return speeds

    def disk(self):
        """The same; objects are files, and I/O is direct."""
        import asyncio
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        buffers = self.host_memory(STAGED, False)
        buffers.get_memory_allocator().buffer.fill_(1)
        store = LocalDiskBackend(self.config(local_cpu=False), loop, buffers, "cpu", metadata=self.metadata)
        free, chunks = threading.Semaphore(STAGED), range(self.blocks // self.per)

        def put():
            for at in chunks:
                free.acquire()
                chunk = self.fill(buffers, at)
                store.submit_put_task(self.key("disk", at), chunk, lambda key: free.release())
                chunk.ref_count_down()
            for _ in range(STAGED):
                free.acquire()

        def get():
            step = 2 * self.threads
            for first in chunks[::step]:
                batch = chunks[first:first + step]
                for at, chunk in zip(batch, store.batched_get_blocking([self.key("disk", at) for at in batch])):
                    self.take(chunk, at)
        speeds = speed(self.blocks, put), speed(self.blocks, get)
        self.check(chunks)
        return speeds


class Mooncake:
    """Its store in the process that has the segment, so that it copies and opens no connection; its master beside it."""

    def __init__(self, directory, blocks):
        self.directory, self.blocks = directory, blocks

    def open(self, blocks, on_disk):
        import mooncake
        import numpy
        from mooncake.store import MooncakeDistributedStore
        program = f"{os.path.dirname(mooncake.__file__)}/mooncake_master"
        os.chmod(program, 0o755)
        subprocess.Popen([program, "--rpc_address=127.0.0.1", f"--rpc_port={MASTER}", "--metrics_host=127.0.0.1",
                          f"--metrics_port={ADMIN}", f"--enable_offload={str(on_disk).lower()}"],
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(2)
        self.store = MooncakeDistributedStore()
        if self.store.setup("127.0.0.1", "P2PHANDSHAKE", 2 * blocks * BLOCK, 64 << 20, "tcp", "", f"127.0.0.1:{MASTER}",
                            enable_ssd_offload=on_disk, ssd_offload_path=self.directory):
            raise RuntimeError("its store does not start")
        self.pool = numpy.random.randint(0, 255, POOL * BLOCK, dtype=numpy.uint8)
        self.target = numpy.ones_like(self.pool)
        for memory in (self.pool, self.target):
            self.store.register_buffer(memory.ctypes.data, memory.nbytes)

    def move(self, call, pool, name, count):
        for first in range(0, count, STAGED):
            numbers = range(first, min(first + STAGED, count))
            pieces = [[pool.ctypes.data + (layer * POOL + number % POOL) * PIECE for layer in range(LAYERS)] for number in numbers]
            results = call([f"{name}{number}" for number in numbers], pieces, [[PIECE] * LAYERS] * len(numbers))
            if min(results) < 0:
                raise RuntimeError(f"a batch failed: {min(results)}")

    def put(self, name, count):
        self.move(self.store.batch_put_from_multi_buffers, self.pool, name, count)

    def get(self, name, count):
        self.move(self.store.batch_get_into_multi_buffers, self.target, name, count)

    def check(self, count):
        put, got = (memory.reshape(LAYERS, POOL, PIECE)[:, :count] for memory in (self.pool, self.target))
        if not (put == got).all():
            raise RuntimeError("what came back is not what was put")

    def host(self):
        self.open(HOST, False)
        # Touches the pages that are used again.
        self.put("first", HOST)
        self.store.remove_all(True)
        speeds = speed(HOST, lambda: self.put("measured", HOST)), speed(HOST, lambda: self.get("measured", HOST))
        self.check(HOST)
        return speeds

    def disk(self):
        """It writes what is in host memory at its next heartbeat, buffered: from the first byte until the files are complete and synced."""
        self.open(self.blocks, True)
        self.put("disk", self.blocks)
        written = self.wait_for(1) or speed(self.blocks, lambda: self.wait_for(self.blocks * BLOCK))
        # Until its master knows, and host memory has none of them.
        keys, tries = {f"disk{number}" for number in range(self.blocks)}, 30
        while keys and (tries := tries - 1):
            time.sleep(1)
            keys -= set(self.store.batch_replica_clear(list(keys), self.store.get_hostname()))
        if keys:
            raise RuntimeError(f"its host memory keeps {len(keys)} blocks")
        speeds = written, speed(self.blocks, lambda: self.get("disk", self.blocks))
        self.check(self.blocks)
        return speeds

    def wait_for(self, size):
        """Until its files are that long; then they are on the disk, and no longer in the page cache."""
        until = time.monotonic() + 60
        files = []
        while sum(os.path.getsize(file) for file in files) < size:
            if time.monotonic() > until:
                raise RuntimeError("it wrote nothing to its folder")
            time.sleep(0.001)
            files = [entry.path for entry in os.scandir(self.directory) if entry.name.endswith(".bucket")]
        for file in files if size > 1 else []:
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def measure_peer(peer, tier, directory, blocks, threads):
    """In a process of its own: put and get in GB/s, as a line for the parent."""
    library, _, tokens = peer.partition("-")
    try:
        subject = Lmcache(int(tokens), directory, blocks, threads) if tokens else Mooncake(directory, blocks)
        answer = getattr(subject, tier)()
    except Exception as error:  # Whatever a peer's library raises is a reason.
        answer = str(error) or type(error).__name__
    print("@ " + json.dumps(answer), flush=True)
    # Its threads do not end by themselves.
    os._exit(0)


def ask_peer(peer, tier, options, env):
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="store-peer-") as directory:
        command = [sys.executable, __file__, peer, tier, directory, str(options.blocks), str(options.threads)]
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            output, errors = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            return f"no answer within {PATIENCE} s"
        finally:
            # With what it started: a master.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for line in output.splitlines():
        if line.startswith("@ "):
            answer = json.loads(line[2:])
            return answer if isinstance(answer, list) else str(answer).splitlines()[0]
    said = errors.strip().splitlines()
    return said[-1] if said else f"it ended with {process.returncode}"


def ask_baton(options, env):
    """One round of the example: (tier, name) -> put and get."""
    command = [options.baton, options.directory, str(options.blocks), "1", str(options.threads)]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {result.stderr.strip()}")
    host = [[float(number) for number in line] for line in re.findall(r"^host \w+ +([\d.]+) GB/s, plain copy +([\d.]+)", result.stdout, re.M)]
    disk = re.findall(r"^disk (write|read) (store|fio|plain)\S*.*? +([\d.]+) +[\d.]+  \(", result.stdout, re.M)

    def best(which):
        rates = [[float(rate) for rw, name, rate in disk if rw == way and (name == "store") == (which == "store")] for way in ("write", "read")]
        return [max(rate) for rate in rates]
    return {("host", "plain copy"): [line[1] for line in host], ("host", "Baton, verified"): [line[0] for line in host],
            ("disk", "fio" if "fio" in result.stdout else "plain, buffered: no fio"): best("fio"), ("disk", "Baton, verified"): best("store")}


def table(runs, problems):
    """Ratios are of the two in each round, so that a machine that slows down does so for both; then the median."""
    base, tier_before = "", ""
    print("| | put GB/s (lowest to highest) | get GB/s (lowest to highest) | put, of a plain copy or fio | get, of a plain copy or fio |")
    print("| --- | --- | --- | --- | --- |")
    for (tier, name), rounds in runs.items():
        if (tier, name) in problems:
            print(f"| {tier}: {name} | does not run here: {problems[tier, name]} | | | |")
            continue
        if tier != tier_before:
            base, tier_before = (tier, name), tier
        cells = [f"{statistics.median(way):.2f} ({min(way):.2f} to {max(way):.2f})" for way in zip(*rounds)]
        ratios = [f"{statistics.median(pair[at] / first[at] for pair, first in zip(rounds, runs[base])):.2f}" for at in (0, 1)]
        print(f"| {tier}: {name} | {' | '.join(cells + ratios)} |")


def main():
    if len(sys.argv) > 1 and sys.argv[1] in PEERS:
        peer, tier, directory, blocks, threads = sys.argv[1:]
        return measure_peer(peer, tier, directory, int(blocks), int(threads))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--baton", default="target/release/examples/throughput")
    parser.add_argument("--venv", default="target/store-venv", type=os.path.abspath)
    parser.add_argument("--directory", default="target", type=os.path.abspath, help="on the disk to measure")
    parser.add_argument("--blocks", type=int, default=400, help="written and read in a round, a multiple of 16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=8, help="of a store, for the disk; fio's depth")
    options = parser.parse_args()
    if options.blocks < 1 or options.blocks % 16:
        parser.error("--blocks: a chunk of 256 tokens is 16 blocks; give a multiple of 16")
    env, runs, problems = environment(options.venv), {}, {}
    for _ in range(options.rounds):
        answers = ask_baton(options, env)
        for tier in ("host", "disk"):
            answers |= {(tier, name): ask_peer(peer, tier, options, env) for peer, name in PEERS.items() if (tier, name) not in problems}
        for row, answer in answers.items():
            runs.setdefault(row, [])
            if isinstance(answer, str):
                problems[row] = answer
            else:
                runs[row].append(answer)
    print(f"\nBlocks of {BLOCK >> 10} KiB: {HOST} in host memory, {options.blocks} on disk with {options.threads} threads; "
          f"medians of {options.rounds} rounds\n")
    table(dict(sorted(runs.items(), key=lambda row: row[0][0] == "disk")), problems)


if __name__ == "__main__":
    main()
