#!/usr/bin/env python3
"""llama.cpp's own server on a GGUF file, from the `xllamacpp` wheel; runs until its standard input closes.

    bench/llama_server.py model.gguf --port 8080 --threads 2 --sequences 16 --context 2048
"""

import argparse
import sys

import xllamacpp


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--sequences", type=int, required=True, help="that run together; others wait")
    parser.add_argument("--context", type=int, required=True, help="tokens of one sequence, prompt and answer")
    args = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = args.gguf
    params.hostnames, params.port = ["127.0.0.1"], args.port
    params.n_parallel, params.n_ctx = args.sequences, args.sequences * args.context
    # A part of the cache for each sequence, as Baton's engine reserves: in a shared one each would mask the others'.
    params.kv_unified = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.n_batch = params.n_ubatch = 512
    params.cache_ram_mib = 0
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
