#!/usr/bin/env python3
"""How far llama.cpp's quantised arithmetic is from f32 arithmetic on the same weights.

    python3 -m venv venv && venv/bin/pip install torch==2.15.0 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0
    venv/bin/python tests/references/transformers_gguf.py smollm2 path/to/SmolLM2-135M-Instruct.Q4_1.gguf

Reads data/NAME.json, writes data/NAME.exact.json: Hugging Face transformers reads the GGUF file, turns every weight into f32,
is fed the prompt and llama.cpp's continuation, and gives its own logits for the five tokens llama.cpp names at each step.
An independent second opinion on the references, and a measure that is free of their noise.
"""

import argparse
import json
import pathlib

import torch
import transformers

from data_files import write_lines

HERE = pathlib.Path(__file__).parent


@torch.no_grad()
def exact_logits(model, prompt):
    """Per step the logits of the tokens in prompt["top"], in that order."""
    ids = prompt["prompt_ids"] + prompt["output_ids"][:-1]
    steps = len(prompt["output_ids"])
    logits = model(torch.tensor([ids]), use_cache=False, logits_to_keep=steps).logits[0]
    return [[round(float(row[i]), 5) for i, _ in top] for row, top in zip(logits, prompt["top"])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="smollm2, gemma or qwen")
    parser.add_argument("gguf", type=pathlib.Path)
    args = parser.parse_args()
    reference = json.loads((HERE / "data" / f"{args.name}.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.gguf.parent, gguf_file=args.gguf.name, dtype=torch.float32, attn_implementation="eager").eval()
    results, differences = [], []
    for prompt in reference["prompts"]:
        rows = exact_logits(model, prompt)
        results.append({"name": prompt["name"], "logits": rows})
        for row, top, lse in zip(rows, prompt["top"], prompt["lse"]):
            differences += [abs(x - (logprob + lse)) for x, (_, logprob) in zip(row, top)]
        print(f"{prompt['name']}: so far {summary(differences)}", flush=True)
    header = {
        "model": args.name,
        "sha256": reference["sha256"],
        "engine": f"transformers {transformers.__version__}, torch {torch.__version__}, f32",
        "llama_cpp_difference": summary(differences),
    }
    write_lines(HERE / "data" / f"{args.name}.exact.json", header, {"prompts": results})


def summary(differences):
    return {"max": round(max(differences), 3), "mean": round(sum(differences) / len(differences), 3)}


if __name__ == "__main__":
    main()
