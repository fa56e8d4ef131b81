#!/usr/bin/env python3
"""One markdown table of what was measured on a GPU: each figure beside what the model of the kernels predicts for an H200, the limit
that was measured in the same run, and its goal.

    table.py DIR        reads DIR/*.jsonl as the other programs write them and DIR/*.verdict of what was checked, and prints

The model is kernels/cuda/model.py. `tests/gpu.sh pack` puts it here with what the kernels need (needs.json); without that nothing is
predicted.
"""

import json
import pathlib
import sys

try:
    import model
except ImportError:
    model = None

HERE = pathlib.Path(__file__).resolve().parent
# Llama 3.1 8B: what a decode step must read at least. The embedding is read a row a token.
LAYERS, HIDDEN, INNER, KV, VOCAB = 32, 4096, 14336, 1024, 128256
MATRICES, HEAD = LAYERS * (2 * HIDDEN * HIDDEN + 2 * KV * HIDDEN + 3 * INNER * HIDDEN), VOCAB * HIDDEN
WEIGHTS = 2 * (MATRICES + HEAD)
# With a byte for each weight of a layer and a scale for each output; the head stays bf16.
WEIGHTS_FP8 = MATRICES + LAYERS * 4 * (3 * HIDDEN + 2 * KV + 2 * INNER) + 2 * HEAD
KV_TOKEN = LAYERS * 2 * KV * 2
CONTEXT = 1024
# Sets of KV this large are not in any cache.
UNCACHED = 256 << 20


def read(folder):
    """Records by the file they are in."""
    files = {}
    for path in sorted(pathlib.Path(folder).glob("*.jsonl")):
        # A program that was ended in the middle of a line has said no more than the lines before.
        lines = [line for line in path.read_text().splitlines() if line.startswith("{") and line.endswith("}")]
        files[path.stem] = [json.loads(line) for line in lines]
    return files


class Table:
    def __init__(self, files, verdicts):
        self.files, self.verdicts, self.rows = files, verdicts, []
        every = [record for records in files.values() for record in records]
        rate = lambda what, unit: max((r[unit] / r["seconds"] for r in every if r.get("what") in what), default=0.0)
        self.bandwidth = rate(("memory", "copy"), "bytes")
        self.products = rate(("matmul",), "operations") or rate(("product",), "operations")
        needs = HERE / "needs.json"
        self.model = model.Model(json.loads(needs.read_text())) if model and needs.exists() else None

    def row(self, what, case, value, ratio="", goal="", met=None, seconds=None, predicted=None):
        verdict = "" if met is None else ("met" if met else "**not met**")
        beside = f"{predicted * 1e3:.3f} ms, measured {seconds / predicted:.2f} ×" if predicted else ""
        self.rows.append((what, case, value, beside, ratio, goal, verdict))

    def predicted(self, what, case):
        return self.model and self.model.predicted(what, case)

    def predicted_step(self, batch, fp8):
        return self.model and self.model.step(model.ATTAINABLE, batch, CONTEXT, fp8).seconds()

    def figures(self, name):
        return self.files.get(name, [])

    def limits(self):
        for record in self.figures("kernels") + self.figures("peer"):
            if record.get("what") in ("memory", "copy"):
                self.row("memory bandwidth", record["case"], f"{record['bytes'] / record['seconds'] / 1e9:.0f} GB/s")
            if record.get("what") == "matmul":
                self.row("bf16 product", record["case"], f"{record['operations'] / record['seconds'] / 1e12:.0f} TFLOP/s")

    def kernels(self):
        for record in self.figures("kernels"):
            what, case, seconds = record.get("what"), record.get("case"), record.get("seconds")
            if what == "agreement":
                # None: one of them gave something that is no number.
                far, most = record["largest"], record["bound"]
                self.row("attention, both kernels", case, "not a number" if far is None else f"{far:.4f} of a head's size apart", "",
                         f"≤ {most:.4f}", far is not None and far <= most)
            if what == "decode" and self.bandwidth:
                rate = record["bytes"] / seconds
                share = rate / self.bandwidth
                # What fits in a cache may be faster than memory, and is no measure of it.
                counts = record["bytes"] >= UNCACHED
                self.row("decode attention", case, f"{rate / 1e9:.0f} GB/s", f"{share:.2f} of bandwidth",
                         "≥ 0.85" if counts else "in cache", share >= 0.85 if counts else None, seconds, self.predicted(what, case))
            elif what == "sample":
                self.row("sampling", case, f"{seconds * 1e6:.1f} µs", seconds=seconds, predicted=self.predicted(what, case))
            elif what == "fp8" and self.products:
                rate = record["operations"] / seconds
                beside = next((r["seconds"] / seconds for r in self.figures("kernels") if (r.get("what"), r.get("case")) == ("product", case)), 0.0)
                self.row("GEMM in fp8", case, f"{rate / 1e12:.0f} TFLOP/s, {record['bytes'] / seconds / 1e9:.0f} GB/s",
                         f"{rate / self.products:.2f} of bf16's limit, {beside:.2f} × as fast as in bf16")
            elif what in ("prefill", "product") and self.products:
                rate = record["operations"] / seconds
                share = rate / self.products
                # Few rows are bound by the weight's bytes, short prompts by what is around the products.
                counts = case.endswith((" 2048 rows", " 8192 rows")) or case.startswith("8192 tokens") and "mma.sync" not in case
                self.row("prefill attention" if what == "prefill" else "GEMM", case, f"{rate / 1e12:.0f} TFLOP/s",
                         f"{share:.2f} of product", "≥ 0.6" if counts else "", share >= 0.6 if counts else None, seconds,
                         self.predicted(what, case))

    def engine(self):
        """Steps of the whole model, ours and the peer's."""
        peer = {r["metric"]: r["value"] for r in self.figures("peer") if "metric" in r}
        for file, name, weights in (("engine", "Llama-3.1-8B", WEIGHTS), ("engine-invariant", "Llama-3.1-8B, invariant", WEIGHTS),
                                    ("engine-fp8", "Llama-3.1-8B, fp8", WEIGHTS_FP8)):
            for record in self.figures(file):
                metric, value = record.get("metric"), record.get("value")
                if not metric:
                    continue
                kind, number = metric.split("_")[0], int(metric.split("_")[1])
                beside = f", {value / peer[metric]:.2f} × transformers" if metric in peer else ""
                if kind == "prefill":
                    self.row(f"{name}, prefill", f"{number} tokens", f"{value:.0f} tokens/s, {number / value * 1e3:.0f} ms",
                             beside.lstrip(", "))
                elif self.bandwidth:
                    step = number / value
                    floor = (weights + number * CONTEXT * KV_TOKEN) / self.bandwidth
                    self.row(f"{name}, decode step", f"batch {number}, {CONTEXT} tokens behind", f"{step * 1e3:.2f} ms",
                             f"{step / floor:.2f} × floor {floor * 1e3:.2f} ms{beside}", "≤ 1.2 ×", step / floor <= 1.2, step,
                             None if file == "engine-invariant" else self.predicted_step(number, file == "engine-fp8"))
        for metric, value in peer.items():
            number = int(metric.split("_")[1])
            step = number / value * 1e3
            self.row("transformers", metric.replace("_", " "), f"{value:.0f} tokens/s, {step:.2f} ms")

    def ipc(self):
        """KV from one process into another, nothing else running; beside the prompt that makes as much of it."""
        prefill = next((8192 / r["value"] for r in self.figures("engine") if r.get("metric") == "prefill_8192"), None)
        for record in self.figures("ipc"):
            if record.get("what") != "ipc":
                continue
            rate, seconds = record["bytes"] / record["seconds"], record["seconds"]
            # Read here and written there, in one memory.
            ratio = f"{2 * rate / self.bandwidth:.2f} of bandwidth" if self.bandwidth else ""
            self.row("cuda-ipc alone", record["case"], f"{rate / 1e9:.0f} GB/s, {seconds * 1e3:.1f} ms", ratio)
            if prefill and record["bytes"] == 8192 * KV_TOKEN:
                self.row("cuda-ipc alone", "8192 tokens, all at the end", f"{seconds * 1e3:.1f} ms",
                         f"{seconds / (seconds + prefill):.3f} of TTFT", "≤ 0.03", seconds / (seconds + prefill) <= 0.03)

    def real_text(self):
        for record in self.figures("text"):
            agree = " and ".join(str(tokens) for tokens in record["agree"])
            self.row("text, GPU = CPU", f"{record['model']}, KV over {record['transport']}",
                     f"{record['right']} of {record['answers']} answers the same up to a tie; {agree} of {record['tokens']} tokens",
                     "", "all", record["right"] == record["answers"])

    def cluster(self):
        for record in self.figures("cluster") + self.figures("handoff"):
            if record.get("what") == "cluster":
                count, same = record["answers"], record["same_logprobs"]
                case = f"{record['model']}, {record['handoffs']:.0f} handoffs over {record['transport']}"
                if "near" in record:
                    self.row("cluster, split = aggregated", f"{case}, prompts on {record['prefill_backend']}",
                             f"{record['near']} of {count} answers the same but for rounding, {record['near_tokens']} of "
                             f"{record['tokens']} tokens", "", "all", record["near"] == count)
                    continue
                self.row("cluster, split = aggregated", case,
                         f"{same} of {count} answers the same, {record['same_text']} in text", "", "all", same == count)
            if record.get("what") == "handoff" and record["transfer_seconds"]:
                # Layers travel while later ones are computed: a lower bound of the rate, and what the client waits for beside it.
                rate, share = record["bytes"] / record["transfer_seconds"], record["exposed_seconds"] / record["ttft_seconds"]
                self.row("handoff", f"{record['model']}, {record['tokens']} tokens, {record['transport']}",
                         f"≥ {rate / 1e9:.1f} GB/s beside computing, TTFT {record['ttft_seconds'] * 1e3:.0f} ms",
                         f"not hidden: {share:.3f} of TTFT", "≤ 0.03", share <= 0.03)

    def text(self):
        for part in (self.limits, self.kernels, self.ipc, self.engine, self.real_text, self.cluster):
            part()
        device = next((r["device"] for r in self.figures("kernels") if "device" in r), "no device")
        lines = [f"{device}; medians of rounds, for decode steps the mean of a run, the first of their size not among them.", "",
                 "| what | case | measured | predicted for an H200 | ratio | goal | |", "| --- | --- | --- | --- | --- | --- | --- |"]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        lines += ["", "Parts: " + "; ".join(self.verdicts) + "."] if self.verdicts else []
        for name in ("kernels", "ipc", "engine", "engine-invariant", "engine-fp8", "peer", "text", "cluster", "handoff"):
            if not self.figures(name):
                lines += ["", f"Not measured: {name}."]
        return "\n".join(lines)


def main():
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    verdicts = [path.read_text().strip() for path in sorted(pathlib.Path(sys.argv[1]).glob("*.verdict"))]
    print(Table(read(sys.argv[1]), verdicts).text())


if __name__ == "__main__":
    main()
