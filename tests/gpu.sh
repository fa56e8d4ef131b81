#!/bin/sh
# All that is checked and measured on a GPU, in two parts, since a machine with one may have no compiler:
#
#   tests/gpu.sh pack DIR       here: compiles the kernels and the programs, and puts what is needed into DIR (at most 64 MiB)
#   DIR/gpu.sh run [PART…]      on the machine with the GPU, which needs its driver, CUDA 13's cuBLAS and python3: every part, or those named,
#                               each within minutes; what they say, what they measure and a table of it in DIR/out, and after each part
#                               the table and an archive of all of it in $OUT, if that is set
#   tests/gpu.sh host           the same programs at small sizes with the kernels compiled for this processor: that they work, not how fast
#
# Parts, those first without which the others mean little: conformance (of every operation, with the kernels that all GPUs have), hopper (the
# same with a Hopper GPU's own; where that fails the others do without them), kernels (bandwidth, products, attention), ipc (KV
# from one process into another), engine (steps of Llama-3.1-8B's shape), models (logits of every architecture against the CPU's), cluster
# (prefill and decode as processes, split against whole), handoff (8,192 tokens), invariant (the engine as workers run), fp8 (conformance, a model and the engine with weights of 8 bits), peer (the same
# under PyTorch and transformers), sanitizer and races (conformance again under compute-sanitizer). A part that fails or takes too long
# does not keep the others from running.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
mode=${1:-}
PARTS="conformance hopper kernels ipc engine models cluster handoff invariant fp8 peer sanitizer races"
LLAMA=random:llama-3.1-8b
STEPS=prefill_8192,decode_1,decode_8,decode_64,decode_256

programs() {
    cargo build "$@" --workspace --example gpu --bin baton
}

# The test of whole models, by the name that cargo gives it.
test_program() {
    said=$(cargo test "$@" --workspace --test cuda --no-run 2>&1) || { echo "$said" >&2; return 1; }
    # The kernels have a test of that name as well.
    for program in $(echo "$said" | sed -n 's/.*(\(.*\/deps\/cuda-[0-9a-f]*\)).*/\1/p'); do
        if "$program" --list | grep -q on_a_gpu; then echo "$program"; fi
    done
}

# Whether a program has the kernels in it.
embeds() {
    python3 -c 'import sys; kernels, program = (open(p, "rb").read() for p in sys.argv[1:]); sys.exit(kernels not in program)' "$@"
}

# CUDA's libraries where the system does not look: those that come with Python packages.
libraries() {
    ldconfig -p 2>/dev/null | grep -q libcublasLt.so.13 && return
    found=$(find / -name 'libcublasLt.so.13' -not -path '/proc/*' 2>/dev/null | head -n 1)
    [ -n "$found" ] || { echo "gpu.sh: this machine has no libcublasLt.so.13; install CUDA 13's libraries" >&2; exit 1; }
    export LD_LIBRARY_PATH="$(dirname "$found")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
}

# A part that the machine has no tool for is left out, and that is said.
lacks() {
    echo "left out: this machine has no $1"
}

measure_engine() {
    "$here/baton" bench engine --backend cuda ${NO_HOPPER:+--no-hopper} "$@" --model $LLAMA --json --chunk 8192 --context 1024 --decode-steps 32 --metrics $STEPS
}

# Conformance under a tool of compute-sanitizer, of our own kernels: cuBLASLt's are many, and it asks its driver what that has not.
sanitized() {
    tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
    if [ -n "$tool" ]; then
        "$tool" --tool "$1" --kernel-name kernel_substring=baton_ --report-api-errors no --error-exitcode 9 "$here/gpu" conformance $2
    else
        lacks compute-sanitizer
    fi
}

# Seconds that a part may take.
limit() {
    case $1 in
    engine | invariant | fp8 | sanitizer | races) echo 420 ;;
    ipc | table) echo 60 ;;
    *) echo 240 ;;
    esac
}

# The machine, as far as its own tools tell.
machine() {
    uname -srm
    nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,temperature.gpu,power.limit --format=csv || true
}

# What is there so far, where it is fetched from: two files.
hand_out() {
    [ -n "${OUT:-}" ] || return 0
    mkdir -p "$OUT"
    cp "$out/table.md" "$OUT/" 2>/dev/null || true
    tar -czf "$here/results.tar.gz" --exclude=results.tar.gz -C "$out" . && cp "$here/results.tar.gz" "$OUT/" || true
}

part() {
    case $1 in
    conformance) "$here/gpu" conformance --no-hopper ;;
    hopper) "$here/gpu" conformance ;;
    models) "$here/models" on_a_gpu --nocapture ;;
    sanitizer) sanitized memcheck "${NO_HOPPER:+--no-hopper}" ;;
    # Of shared memory that copy units write it knows little.
    races) sanitized racecheck --no-hopper ;;
    kernels) "$here/gpu" bench --json ${NO_HOPPER:+--no-hopper} >"$out/kernels.jsonl" ;;
    ipc) "$here/gpu" handoff --json >"$out/ipc.jsonl" ;;
    engine) measure_engine >"$out/engine.jsonl" ;;
    invariant) measure_engine --invariant >"$out/engine-invariant.jsonl" ;;
    fp8)
        "$here/gpu" conformance --fp8
        "$here/models" on_the_gpu --nocapture
        measure_engine --quantization fp8 >"$out/engine-fp8.jsonl"
        ;;
    peer)
        if python3 -c 'import torch, transformers' 2>/dev/null; then
            python3 "$here/gpu-programs/peer.py" --context 1024 --prefill 8192 >"$out/peer.jsonl"
        else
            lacks "PyTorch and transformers"
        fi
        ;;
    cluster)
        : >"$out/cluster.jsonl"
        for model in random:tiny random:smollm2-135m; do
            python3 "$here/gpu-programs/cluster.py" "$here/baton" --model $model --log "$out/cluster.${model#*:}.processes" \
                >>"$out/cluster.jsonl"
        done
        ;;
    handoff)
        # GPU to GPU where workers know that way, else through the host's memory.
        BATON_CHUNK=2048 BATON_TOKEN_BUDGET=2048 BATON_PACK_TOKENS=2048 python3 "$here/gpu-programs/cluster.py" "$here/baton" \
            --model $LLAMA --handoff 8192 --log "$out/handoff.processes" >"$out/handoff.jsonl"
        ;;
    table) python3 "$here/gpu-programs/table.py" "$out" >"$out/table.md" ;;
    *) echo "gpu.sh: no part $1; there are: $PARTS" >&2; return 2 ;;
    esac
}

case $mode in
pack)
    [ $# = 2 ] || { echo "usage: tests/gpu.sh pack DIR" >&2; exit 2; }
    root=$(dirname "$here")
    mkdir -p "$2"
    set -- pack "$(cd "$2" && pwd)"
    "$root/kernels/cuda/build"
    cd "$root"
    programs --release
    models=$(test_program --release)
    cp "$root/target/release/examples/gpu" "$root/target/release/baton" "$2/"
    cp "$root/$models" "$2/models"
    strip "$2/gpu" "$2/baton" "$2/models"
    for program in gpu baton models; do
        embeds "$root/target/cuda/baton.fatbin" "$2/$program" || { echo "gpu.sh: $program was built without the kernels" >&2; exit 1; }
    done
    gzip -f "$2/gpu" "$2/baton" "$2/models"
    # Reference data lies where the test was built.
    rm -rf "$2/references" "$2/gpu-programs"
    cp -r "$here/references" "$2/references"
    cp -r "$here/gpu" "$2/gpu-programs"
    echo "$here" >"$2/built-at"
    cp "$here/gpu.sh" "$2/gpu.sh"
    size=$(du -sm "$2" | cut -f 1)
    echo "$2: $size MiB"
    [ "$size" -le 64 ] || { echo "gpu.sh: more than the 64 MiB that may be carried" >&2; exit 1; }
    ;;
run)
    shift
    libraries
    out=$here/out
    mkdir -p "$out"
    machine 2>&1 | tee "$out/machine.log"
    for program in gpu baton models; do
        [ ! -e "$here/$program.gz" ] || gunzip -f "$here/$program.gz"
    done
    built=$(cat "$here/built-at")
    if [ ! -e "$built" ]; then
        mkdir -p "$(dirname "$built")"
        ln -s "$here" "$built"
    fi
    status=0
    for part in ${*:-$PARTS}; do
        began=$(date +%s)
        # A part has a shell of its own, which ends at its first failure; the others go on. All that it has started ends with it.
        code=0
        timeout -k 10 "$(limit "$part")" sh "$here/gpu.sh" part "$part" >"$out/$part.log" 2>&1 || code=$?
        case $code in
        0) said=ok lines=12 ;;
        124 | 137) said="FAILED, took longer than $(limit "$part") s" lines=40 status=1 ;;
        *) said=FAILED lines=40 status=1 ;;
        esac
        if [ "$said" = ok ] && grep -q '^left out:' "$out/$part.log"; then said="left out"; fi
        # As much of the end as helps, and of what its processes said where it failed.
        tail -n $lines "$out/$part.log" | cut -c 1-400
        if [ "$said" != ok ]; then
            for log in "$out/$part".*processes; do
                [ ! -e "$log" ] || { echo "-- $(basename "$log")"; tail -n 25 "$log" | cut -c 1-400; }
            done
        fi
        echo "== $part: $said ($(($(date +%s) - began)) s)"
        echo "$part: $said${NO_HOPPER:+, without Hopper's kernels}" >"$out/$part.verdict"
        if [ "$part" = hopper ] && [ $code != 0 ]; then
            export NO_HOPPER=1 BATON_HOPPER_ATTENTION=false
        fi
        part table >"$out/table.log" 2>&1 || { cat "$out/table.log"; status=1; }
        hand_out
    done
    cat "$out/table.md" || status=1
    exit $status
    ;;
part)
    out=$here/out
    part "$2"
    ;;
host)
    root=$(dirname "$here")
    cd "$root"
    programs
    # Conformance and models on the host are among the tests already.
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
    target/debug/examples/gpu bench --host --json >"$out/kernels.jsonl"
    target/debug/examples/gpu handoff --host --json >"$out/ipc.jsonl"
    target/debug/baton bench engine --model random:tiny --json --no-profile --chunk 64 --decode-steps 4 \
        --metrics prefill_64,decode_1,decode_2 >"$out/engine.jsonl"
    python3 "$here/gpu/cluster.py" target/debug/baton --backend cpu --model random:tiny --log "$out/log" >"$out/cluster.jsonl"
    python3 "$here/gpu/cluster.py" target/debug/baton --backend cpu --model random:tiny --handoff 1500 --log "$out/log" \
        >"$out/handoff.jsonl"
    if python3 -c 'import torch, transformers' 2>/dev/null; then
        python3 "$here/gpu/peer.py" --tiny --context 32 --prefill 64 --steps 4 --batches 1,2 >"$out/peer.jsonl"
    fi
    python3 "$here/gpu/table.py" "$out"
    # On a host without a GPU: an error, no panic.
    if [ ! -e /dev/nvidiactl ]; then
        if target/debug/examples/gpu bench; then exit 1; fi
    fi
    ;;
*)
    sed -n '2,18s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
