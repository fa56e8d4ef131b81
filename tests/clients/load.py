#!/usr/bin/env python3
"""Loads a running router with AIPerf as its users do, over chats and completions, and checks that nothing failed.

    load.py --url http://127.0.0.1:8000 --model smollm2 --gguf FILE --aiperf VENV

AIPerf makes prompts with a tokenizer in a Hugging Face directory; this one is the file's. The router counts the tokens.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
REQUESTS, TOKENS = 60, 32


def load(args, endpoint, folder):
    """The summary that AIPerf writes."""
    subprocess.run([args.aiperf / "bin/python", BENCH / "gguf_directory.py", args.gguf, folder / "tokenizer"], check=True)
    subprocess.run([args.aiperf / "bin/aiperf", "profile", "--url", args.url, "--model", args.model, "--endpoint-type", endpoint, "--streaming",
                    "--tokenizer", str(folder / "tokenizer"), "--use-server-token-count", "--concurrency", "6", "--request-count", str(REQUESTS),
                    "--isl", "200", "--osl", str(TOKENS), "--extra-inputs", "ignore_eos:true", "--random-seed", "1", "--ui", "none",
                    "--artifact-dir", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gguf", required=True, help="the model's file")
    parser.add_argument("--aiperf", required=True, type=pathlib.Path, help="virtual environment with what aiperf.txt pins")
    args = parser.parse_args()
    failed = False
    for endpoint in ["chat", "completions"]:
        with tempfile.TemporaryDirectory() as folder:
            summary = load(args, endpoint, pathlib.Path(folder))
        value = lambda name, of="avg": (summary.get(name) or {}).get(of)  # noqa: E731
        served, tokens, errors = value("request_count"), value("output_sequence_length"), summary.get("error_summary")
        right = served == REQUESTS and tokens == TOKENS and not errors
        failed |= not right
        print(f"{'ok' if right else 'FAILED'}  {endpoint}: {served} of {REQUESTS} requests, {tokens} tokens each, errors {errors}; "
              f"p50 to the first token {value('time_to_first_token', 'p50')} ms, between tokens {value('inter_token_latency', 'p50')} ms")
    sys.exit(failed)


if __name__ == "__main__":
    main()
