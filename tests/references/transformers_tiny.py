#!/usr/bin/env python3
"""Reference logits of Hugging Face transformers for tiny random models of every architecture.

    python3 -m venv venv && venv/bin/pip install torch==2.15.0 transformers==5.23.0
    venv/bin/python tests/references/transformers_tiny.py

Reads data/tiny_configs.json, writes data/tiny.json. Weights are not stored: `values` below makes them from the tensor's
name, and tests/src/tiny.rs does the same to the bit. Everything runs in f32 on weights rounded to the configured dtype,
with plain attention and without a KV cache: each step computes the whole sequence again. Generation ignores end tokens.
"""

import json
import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
PROMPT_LENGTHS = [1, 7, 40, 200]
STEPS = 24
# Seeds are chosen so that the best token leads by more than this at every step: then ids must agree exactly.
NEAR_TIE = 0.002
MASK = (1 << 64) - 1


def fnv1a(text):
    """64-bit FNV-1a."""
    state = 0xCBF29CE484222325
    for byte in text.encode():
        state = (state ^ byte) * 0x100000001B3 & MASK
    return state


def random_u64(seed, name, count):
    """The first `count` outputs of SplitMix64 started at fnv1a(name) xor seed."""
    with np.errstate(over="ignore"):
        step = np.uint64(0x9E3779B97F4A7C15)
        z = np.uint64(fnv1a(name) ^ seed) + np.arange(1, count + 1, dtype=np.uint64) * step
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def centre_and_range(name, shape, gemma):
    """Weights of a tensor are uniform in [centre - range, centre + range).

    Layers outweigh the embedding in the residual stream, so that a defect in a layer shows in the logits. Gemma adds 1 to
    its norms' weights and scales its embedding by the root of the hidden size.
    """
    if name.endswith("norm.weight"):
        return 1.0, 0.25
    if name.endswith(".bias"):
        return 0.0, 0.5
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return 0.0, (0.25 if gemma else 0.5)
    gain = 1.5 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
    return 0.0, gain * float(np.sqrt(np.float64(3.0) / np.float64(shape[1])))


def values(seed, name, shape, gemma):
    """f32 weights: 24 random bits as an exact number in [-1, 1), times the range, plus the centre, each rounded to f32."""
    centre, spread = centre_and_range(name, shape, gemma)
    bits = (random_u64(seed, name, int(np.prod(shape))) >> np.uint64(40)).astype(np.float32)
    unit = bits * np.float32(2.0**-23) - np.float32(1.0)
    return (unit * np.float32(spread) + np.float32(centre)).reshape(shape)


def checksum(weights):
    """Order-dependent sum over all bits of a tensor: sum of bits[i] * (2i + 1) modulo 2^64."""
    bits = np.ascontiguousarray(weights).reshape(-1).view(np.uint32).astype(np.uint64)
    with np.errstate(over="ignore"):
        return int((bits * (np.arange(bits.size, dtype=np.uint64) * np.uint64(2) + np.uint64(1))).sum())


def build(entry):
    """The model with the formula's weights, and what to record of them."""
    config = dict(entry["config"])
    architecture = config.pop("architectures")[0]
    config.pop("torch_dtype")
    model_class = getattr(transformers, architecture)
    parsed = model_class.config_class(**config)
    parsed._attn_implementation = "eager"
    model = model_class(parsed).eval()
    gemma = architecture.startswith("Gemma")
    rounded = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[entry["dtype"]]
    tensors = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weights = values(entry["seed"], name, tuple(parameter.shape), gemma)
            parameter.copy_(torch.from_numpy(weights).to(rounded).to(torch.float32))
            tensors.append({"name": name, "shape": list(weights.shape), "checksum": f"{checksum(weights):016x}",
                            "first": [exact(x) for x in weights.reshape(-1)[:2]]})
    return model, sorted(tensors, key=lambda t: t["name"])


def exact(x):
    """The shortest decimal that gives this f32 back."""
    return float(str(np.float32(x)))


@torch.no_grad()
def run_prompt(model, seed, length):
    """One prompt: its ids, the greedy continuation, logits at some positions of the two together."""
    vocab = model.config.vocab_size
    ids = [int(x) % vocab for x in random_u64(seed, f"prompt/{length}", length)]
    gap = float("inf")
    for _ in range(STEPS):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
        best = torch.topk(logits[-1], 2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    # Logits before the last token was appended: positions 0 ..= length + STEPS - 2.
    wanted = [length - 1, length + STEPS - 2]
    if length >= 100:
        wanted = [length // 4, length // 2] + wanted
    rows = [{"position": p, "values": [exact(x) for x in logits[p].numpy()]} for p in wanted]
    return {"prompt_ids": ids[:length], "output_ids": ids[length:], "smallest_gap": round(gap, 5), "logits": rows}


def main():
    torch.set_num_threads(1)
    results = []
    for entry in json.loads((HERE / "data/tiny_configs.json").read_text()):
        model, tensors = build(entry)
        prompts = [run_prompt(model, entry["seed"], n) for n in PROMPT_LENGTHS]
        gap = min(p["smallest_gap"] for p in prompts)
        spread = np.std(prompts[-1]["logits"][-1]["values"])
        distinct = len({i for p in prompts for i in p["output_ids"]})
        print(f"{entry['name']}: smallest gap {gap:.4f}, logits' deviation {spread:.2f}, {distinct} distinct ids", flush=True)
        if gap < NEAR_TIE:
            raise SystemExit(f"{entry['name']}: a near tie; give it another seed in data/tiny_configs.json")
        results.append({"name": entry["name"], "tensors": tensors, "prompts": prompts})
    write(results)


def write(results):
    """JSON with a line for each prompt and each model's tensors, so that a change shows as a change of its lines."""
    compact = lambda value: json.dumps(value, separators=(",", ":"))
    models = []
    for r in results:
        prompts = ",\n".join(map(compact, r["prompts"]))
        models.append(f'{{"name":{compact(r["name"])},\n"tensors":{compact(r["tensors"])},\n"prompts":[\n{prompts}\n]}}')
    engine = f"transformers {transformers.__version__}, torch {torch.__version__}"
    text = f'{{"engine":{compact(engine)},\n"models":[\n' + ",\n".join(models) + "\n]}\n"
    (HERE / "data/tiny.json").write_text(text)


if __name__ == "__main__":
    main()
