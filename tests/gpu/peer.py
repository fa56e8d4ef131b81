#!/usr/bin/env python3
"""What PyTorch and transformers reach on the same GPU: copy bandwidth, bf16 products, and Llama-3.1-8B's shape with random weights.

One JSON object a line, in the form of `gpu bench --json` and `baton bench engine --json`. `--tiny` runs a small shape on the CPU, to see
that this program works. A part that fails says so on standard error and leaves the others alone.
"""

import argparse
import json
import statistics
import sys
import time
import traceback

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

ROUNDS = 5

LLAMA = dict(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=False,
)
TINY = dict(
    vocab_size=640, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=2048, rms_norm_eps=1e-5, tie_word_embeddings=False,
)


def tell(**record):
    print(json.dumps(record), flush=True)


class Bench:
    def __init__(self, tiny):
        self.device = torch.device("cpu" if tiny else "cuda")
        self.tiny = tiny

    def wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run, repeats):
        """The median round's time of one run; the first round does not count."""
        rounds = []
        for _ in range(ROUNDS + 1):
            self.wait()
            began = time.perf_counter()
            for _ in range(repeats):
                run()
            self.wait()
            rounds.append((time.perf_counter() - began) / repeats)
        return statistics.median(rounds[1:])

    def limits(self):
        size = 1 << (16 if self.tiny else 30)
        source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        seconds = self.seconds(lambda: target.copy_(source), 10)
        tell(what="copy", case=f"torch, {size} bytes", seconds=seconds, bytes=2 * size, operations=0)
        n = 64 if self.tiny else 8192
        a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        seconds = self.seconds(lambda: torch.matmul(a, b), 10)
        tell(what="matmul", case=f"torch, {n} x {n} x {n}", seconds=seconds, bytes=0, operations=2 * n**3)

    def model(self):
        config = LlamaConfig(**(TINY if self.tiny else LLAMA), attn_implementation="sdpa")
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(self.device):
            self.llama = LlamaForCausalLM(config).eval()
        self.config = config

    def prefill(self, tokens):
        ids = torch.randint(0, self.config.vocab_size, (1, tokens), device=self.device)
        seconds = self.seconds(lambda: self.llama(ids, use_cache=True, logits_to_keep=1), 1)
        tell(metric=f"prefill_{tokens}", value=tokens / seconds, unit="tokens/s", peer="transformers")

    def decode(self, batch, context, steps):
        """Steps after `context` tokens whose KV is made up; the attention reads as much."""
        heads = self.config.num_key_value_heads
        dim = self.config.hidden_size // self.config.num_attention_heads
        cache = DynamicCache()
        for layer in range(self.config.num_hidden_layers):
            kv = [torch.randn(batch, heads, context, dim, dtype=torch.bfloat16, device=self.device) for _ in range(2)]
            cache.update(*kv, layer)
        ids = torch.randint(0, self.config.vocab_size, (batch, 1), device=self.device)
        times = []
        for _ in range(steps):
            self.wait()
            began = time.perf_counter()
            out = self.llama(ids, past_key_values=cache, use_cache=True)
            ids = out.logits[:, -1:].argmax(-1)
            self.wait()
            times.append(time.perf_counter() - began)
        seconds = statistics.median(times[2:])
        tell(metric=f"decode_{batch}", value=batch / seconds, unit="tokens/s", peer="transformers")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--prefill", type=int, default=8192)
    parser.add_argument("--batches", default="1,8,64,256")
    args = parser.parse_args()
    bench = Bench(args.tiny)
    parts = [bench.limits, bench.model, lambda: bench.prefill(args.prefill)]
    parts += [lambda batch=int(b): bench.decode(batch, args.context, args.steps) for b in args.batches.split(",")]
    failed = False
    with torch.inference_mode():
        for part in parts:
            try:
                part()
            except Exception:  # The others may still say something.
                traceback.print_exc()
                failed = True
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()
    sys.exit(failed)


if __name__ == "__main__":
    main()
