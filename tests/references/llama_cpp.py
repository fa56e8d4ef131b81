#!/usr/bin/env python3
"""Reference outputs of llama.cpp for the GGUF models.

    python3 -m venv venv && venv/bin/pip install xllamacpp==2026.10.11549
    venv/bin/python tests/references/llama_cpp.py smollm2 path/to/SmolLM2-135M-Instruct.Q4_1.gguf

Writes data/NAME.json: for every prompt of prompts.json its token ids, the greedy continuation and the five most likely
tokens at every step; for every text of texts.json its token ids. Settings are chosen for accuracy and repeatability:
attention in plain form, weights as they are in the file, one sequence at a time from an empty KV cache in f16, one
thread. Generation goes on past end tokens, so that every prompt gives the same number of steps.
"""

import argparse
import hashlib
import json
import math
import pathlib

import llama_capi
from data_files import write_lines

HERE = pathlib.Path(__file__).parent
TOP = 5


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def top_logits(logits):
    """The TOP largest as (id, logit), largest first, and the natural log of the sum of exponentials of all."""
    best = sorted(range(len(logits)), key=logits.__getitem__, reverse=True)[:TOP]
    peak = logits[best[0]]
    lse = peak + math.log(math.fsum(math.exp(x - peak) for x in logits))
    return [(i, logits[i]) for i in best], lse


def run_prompt(context, prompt_ids, steps):
    """Greedy: (output ids, per step the top ids with log probabilities, per step the log of the sum of exponentials)."""
    context.clear()
    context.prefill(prompt_ids)
    output, tops, lses = [], [], []
    while True:
        best, lse = top_logits(context.logits())
        output.append(best[0][0])
        tops.append([[i, round(x - lse, 5)] for i, x in best])
        lses.append(round(lse, 5))
        if len(output) == steps:
            return output, tops, lses
        context.decode([(output[-1], len(prompt_ids) + len(output) - 1, 0, True)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="smollm2, gemma or qwen: names the output file")
    parser.add_argument("gguf", type=pathlib.Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=32, help="tokens to generate")
    parser.add_argument("--long", type=int, default=400, help="a prompt of more tokens counts as long")
    parser.add_argument("--long-steps", type=int, help="tokens to generate for a long prompt (default: --steps)")
    parser.add_argument("--out", type=pathlib.Path, help="default: data/NAME.json beside this script")
    args = parser.parse_args()

    prompts = json.loads((HERE / "prompts.json").read_text())
    texts = json.loads((HERE / "texts.json").read_text())
    model = llama_capi.Model(args.gguf, repack=False)
    tokenized = [model.tokenize(p["text"]) for p in prompts]
    room = max(map(len, tokenized)) + args.steps
    context = llama_capi.Context(model, room, threads=args.threads, flash=llama_capi.FLASH_OFF)

    results = []
    for prompt, ids in zip(prompts, tokenized):
        steps = args.long_steps if args.long_steps and len(ids) > args.long else args.steps
        output, tops, lses = run_prompt(context, ids, steps)
        ends = [i for i, token in enumerate(output) if model.ends_generation(token)]
        results.append({
            "name": prompt["name"],
            "prompt_ids": ids,
            "output_ids": output,
            "output_text": model.detokenize(output).decode(errors="replace"),
            "first_end": ends[0] if ends else None,
            "top": tops,
            "lse": lses,
        })
        gap = min(t[0][1] - t[1][1] for t in tops)
        print(f"{prompt['name']}: {len(ids)} tokens in, {steps} out, smallest gap {gap:.3f}", flush=True)

    header = {
        "model": args.name,
        "file": args.gguf.name,
        "sha256": sha256(args.gguf),
        "engine": f"llama.cpp in {llama_capi.WHEEL} {llama_capi.VERSION}",
        "settings": "greedy, KV f16, flash attention off, weights not repacked, past end tokens",
        "vocab_size": model.vocab_size,
    }
    write_lines(args.out or HERE / "data" / f"{args.name}.json", header, {
        "prompts": results,
        "texts": [{"text": t, "ids": model.tokenize(t)} for t in texts],
    })


if __name__ == "__main__":
    main()
