#!/usr/bin/env python3
"""How far lossless compression gets with KV that is on a disk, and how fast: KV of real prompts, as `--kv-disk` has it.

    python3 -m venv target/compression-venv && target/compression-venv/bin/pip install numpy zstandard lz4
    target/compression-venv/bin/python bench/compression.py FILE.baton-kv

Prints for each way the bytes that are left, and the gigabytes of KV a second of one core, in and out: of f16 and bf16, the high bytes (sign, exponent and the
first bits of the fraction) are compressed alone, since the low ones are noise; each block by itself, since each is read by itself.
"""
import json
import pathlib
import sys
import time

import lz4.frame
import numpy
import zstandard

PAGE, SEGMENT, MOST = 4096, 32 << 20, 200


def blocks(path):
    """The KV of blocks, without their heads."""
    layout = json.loads(pathlib.Path(f"{path}.json").read_text())["layout"]
    if layout["dtype"] not in ("f16", "bf16"):
        raise SystemExit(f"its KV is {layout['dtype']}; f16 or bf16 is needed")
    group = layout["groups"][0]
    data = 2 * layout["block_size"] * len(group["layers"]) * group["planes"] * group["kv_heads"] * group["head_dim"]
    stride = -(-data // PAGE) * PAGE + PAGE
    found, size = [], path.stat().st_size
    with path.open("rb") as file:
        for segment in range(0, size, SEGMENT):
            for at in range(segment, segment + SEGMENT - stride + 1, stride):
                file.seek(at)
                record = file.read(stride)
                if any(record[:PAGE]):
                    found.append(record[PAGE : PAGE + data])
    if not found:
        raise SystemExit("there are no blocks in it")
    return layout["dtype"], found[:: -(-len(found) // MOST)]


def high(block):
    return numpy.frombuffer(block, numpy.uint8)[1::2].tobytes()


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    dtype, found = blocks(pathlib.Path(sys.argv[1]))
    whole = sum(map(len, found))
    print(f"{len(found)} blocks of {len(found[0]) // 1024} KiB, {dtype}\n")
    print("| what is compressed | by | bytes left | in | out |\n| --- | --- | ---: | ---: | ---: |")
    zstd = zstandard.ZstdCompressor(level=1).compress, zstandard.ZstdDecompressor().decompress
    for what, parts, share in (("all", found, 1), ("high bytes", [high(block) for block in found], 0.5)):
        for name, (shrink, grow) in (("lz4", (lz4.frame.compress, lz4.frame.decompress)), ("zstd -1", zstd)):
            begun = time.perf_counter()
            small = [shrink(part) for part in parts]
            between = time.perf_counter()
            if [grow(part) for part in small] != parts:
                raise SystemExit(f"{name} gives something else back")
            ended = time.perf_counter()
            left = 1 - share + sum(map(len, small)) / whole
            print(f"| {what} | {name} | {left:.0%} | {whole / (between - begun) / 1e9:.2f} GB/s | {whole / (ended - between) / 1e9:.2f} GB/s |")


if __name__ == "__main__":
    main()
