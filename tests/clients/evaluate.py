#!/usr/bin/env python3
"""Scores a model with lm-eval twice: through a running router, and by transformers on the same weights.

    evaluate.py --base-url http://127.0.0.1:8000/v1 --model NAME --weights DIRECTORY

The task is made here: questions whose answers a small model knows, each with four answers to choose from by their log probabilities.
DIRECTORY has the weights and the tokenizer in the form of transformers. Both scores must be the same, and so must, within rounding, the log
likelihood of each answer.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "China": "Beijing", "Russia": "Moscow",
    "Egypt": "Cairo", "Greece": "Athens", "Portugal": "Lisbon", "Austria": "Vienna", "Poland": "Warsaw", "Canada": "Ottawa", "Cuba": "Havana",
    "Peru": "Lima", "Ireland": "Dublin", "Norway": "Oslo", "Sweden": "Stockholm", "Turkey": "Ankara", "India": "New Delhi",
}
# As large as the difference may be that comes from the order of sums.
NEAR = 0.05

TASK = """\
task: capitals
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def write_task(folder):
    capitals = list(CAPITALS.values())
    rows = []
    for at, (country, capital) in enumerate(CAPITALS.items()):
        choices = [capital] + [capitals[(at + step) % len(capitals)] for step in (3, 7, 12)]
        choices = choices[at % 4:] + choices[:at % 4]
        rows.append({"question": f"The capital of {country} is", "choices": choices, "answer": choices.index(capital)})
    data = folder / "capitals.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "capitals.yaml").write_text(TASK.format(data=data))


def score(folder, model, arguments):
    out = folder / model
    command = [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", arguments, "--tasks", "capitals", "--include_path", folder,
               "--output_path", out, "--log_samples", "--batch_size", "8", "--device", "cpu"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    (results,) = out.rglob("results_*.json")
    (samples,) = out.rglob("samples_*.jsonl")
    found = json.loads(results.read_text())["results"]["capitals"]
    lines = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda line: line["doc_id"])
    likelihoods = [float(answer[0][0] if isinstance(answer[0], list) else answer[0]) for line in lines for answer in line["resps"]]
    return {name: found[name] for name in ("acc,none", "acc_norm,none")}, likelihoods


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--base-url", required=True)
    arguments.add_argument("--model", required=True)
    arguments.add_argument("--weights", required=True)
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        write_task(folder)
        ours = score(folder, "local-completions",
                     f"model={args.model},base_url={args.base_url}/completions,tokenizer={args.weights},num_concurrent=4,tokenized_requests=True")
        theirs = score(folder, "hf", f"pretrained={args.weights},dtype=float32")
    print(f"through the router {ours[0]}, by transformers {theirs[0]}")
    gaps = [abs(a - b) for a, b in zip(ours[1], theirs[1], strict=True)]
    print(f"{len(gaps)} log likelihoods; the largest difference is {max(gaps):.4f}")
    assert ours[0] == theirs[0], "the scores differ"
    assert ours[0]["acc,none"] > 0.5, "the model knows nothing; a score by chance proves nothing"
    assert max(gaps) <= NEAR, f"the log likelihoods differ by more than {NEAR}"


if __name__ == "__main__":
    main()
