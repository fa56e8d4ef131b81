#!/usr/bin/env python3
"""Measures llama.cpp on a GGUF file, in process, without a server and without sampling.

    bench/llama_cpp.py model.gguf --threads 2

Prints a JSON line {"metric", "value", "unit"} for each metric:
  prefill_N  tokens a second of one prompt of N tokens from an empty KV cache, logits of the last token only
  decode_B   tokens a second over all of B sequences that each have --decode-context tokens behind them
Settings are llama.cpp's own defaults (weights repacked for the CPU, flash attention where it helps), KV in f16.
"""

import argparse
import json
import os
import pathlib
import random
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests/references"))
import llama_capi  # noqa: E402

METRICS = "prefill_512,prefill_2048,decode_1,decode_8,decode_32"


def prefill(model, tokens, args):
    """Tokens a second. The first, shorter run warms caches and thread pools up."""
    context = llama_capi.Context(model, tokens, threads=args.threads)
    ids = random_ids(model, tokens)
    context.prefill(ids[: max(1, tokens // 8)])
    context.wait()
    context.clear()
    start = time.perf_counter()
    context.prefill(ids)
    context.wait()
    seconds = time.perf_counter() - start
    context.close()
    return tokens / seconds


def decode(model, sequences, args):
    """Tokens a second of all sequences together; each step adds one token to each."""
    # llama.cpp rounds each sequence's share of the cache to a multiple of 256.
    room = -(-(args.decode_context + args.decode_steps + 1) // 256) * 256
    context = llama_capi.Context(model, sequences * room, sequences=sequences, threads=args.threads)
    for sequence in range(sequences):
        context.prefill(random_ids(model, args.decode_context), sequence)
    tokens = random_ids(model, sequences)
    step = lambda n: context.decode([(t, args.decode_context + n, s, True) for s, t in enumerate(tokens)])
    step(0)
    context.wait()
    start = time.perf_counter()
    for n in range(1, args.decode_steps + 1):
        step(n)
        context.wait()
    seconds = time.perf_counter() - start
    context.close()
    return sequences * args.decode_steps / seconds


def random_ids(model, count):
    return random.Random(count).choices(range(model.vocab_size), k=count)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=pathlib.Path)
    parser.add_argument("--library", help="a libllama.so; default: the one in the wheel, which is for AVX2")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--metrics", default=METRICS, help=f"default: {METRICS}")
    parser.add_argument("--decode-context", type=int, default=128, help="tokens before the first measured step")
    parser.add_argument("--decode-steps", type=int, default=64, help="measured steps")
    args = parser.parse_args()
    wanted = [name.rsplit("_", 1) for name in args.metrics.split(",")]
    kinds = {"prefill": prefill, "decode": decode}
    if bad := [w for w in wanted if len(w) != 2 or w[0] not in kinds or not w[1].isdigit() or w[1] == "0"]:
        parser.error(f"--metrics has {'_'.join(bad[0])!r}; names are prefill_N and decode_N with N above 0")
    model = llama_capi.Model(args.gguf, library=args.library)
    print("llama.cpp:", model.lib.llama_print_system_info().decode(), file=sys.stderr)
    for kind, size in wanted:
        value = kinds[kind](model, int(size), args)
        print(json.dumps({"metric": f"{kind}_{size}", "value": round(value, 2), "unit": "tokens/s"}), flush=True)
    model.close()


if __name__ == "__main__":
    main()
