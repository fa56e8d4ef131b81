#!/bin/sh
# All that is checked and measured on a GPU, in two parts, since a machine with one may have no compiler:
#
#   tests/gpu.sh pack DIR       here: compiles the kernels and the programs, and puts what is needed into DIR (at most 50 MiB)
#   sh DIR/gpu.sh run [PART…]   on the machine with the GPU, which needs its driver, CUDA 13's cuBLAS and python3: every part, or those
#                               named, each within minutes; what they say, what they measure and a table of it in DIR/out, and after
#                               each part the table and an archive of all of it, results.tar.gz, in DIR and in $OUT, if that is set
#   tests/gpu.sh host           the same programs at small sizes with the kernels compiled for this processor: that they work, not how fast
#
# Parts, those first without which the others mean little: conformance (of every operation, with the kernels that all GPUs have), hopper
# (the same with a Hopper GPU's own; where that fails the others do without them), kernels (bandwidth and the rate of a large product,
# then the model's products, attention by every kernel it has, sampling), transports (conformance of every transport between GPU pools,
# with peers that are stopped and killed; of UCX where it can be fetched), sharing (the life of a pool that processes share by descriptors:
# peers in other namespaces, peers that die, nothing that leaks, and the fallback), ipc (KV from one process into another), engine (steps of
# Llama-3.1-8B's shape), models (logits of every architecture against the CPU's), text (a real model's, beside the CPU's), ranks (the same
# of two GPUs together), cluster (prefill and decode as processes, split against whole: in device memory, through the host's, and with
# prompts computed on the CPU), handoff (8,192 tokens), invariant (the engine as workers run), fp8 (conformance, a model and the engine
# with weights of 8 bits), peer (the same under PyTorch and transformers), sanitizer and races (conformance again under
# compute-sanitizer). A part that fails or takes too long does not keep the others from running.
#
# Where a call may take ten minutes only, run them in several. With SECONDS_AT_MOST=570 no part goes on for longer than is left of that,
# and those that no time is left for are named. Results of earlier calls are gone on with where DIR/results.tar.gz has them: on a machine
# that is another each time, put the last call's $OUT/results.tar.gz into DIR before the next, so that its rows have the bandwidth
# measured before. By what parts are expected to take, three calls do:
#
#   run conformance hopper kernels transports sharing ipc models text
#   run engine cluster ranks handoff
#   run fp8 invariant peer sanitizer races
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
mode=${1:-}
PARTS="conformance hopper kernels transports sharing ipc engine models text ranks cluster handoff invariant fp8 peer sanitizer races"
PROGRAMS="gpu baton models ranks"
LLAMA=random:llama-3.1-8b
STEPS=prefill_8192,decode_1,decode_8,decode_64,decode_256

programs() {
    cargo build "$@" --workspace --example gpu --bin baton
}

# A program of tests, by the name that cargo gives it and a word of the test that is wanted of it.
test_program() {
    name=$1 word=$2
    shift 2
    said=$(cargo test "$@" --workspace --test "$name" --no-run 2>&1) || { echo "$said" >&2; return 1; }
    # The kernels have a test of whole models' name as well.
    for program in $(echo "$said" | sed -n "s/.*(\\(.*\\/deps\\/$name-[0-9a-f]*\\)).*/\\1/p"); do
        if "$program" --list | grep -q "$word"; then echo "$program"; fi
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

# NCCL likewise; whether there is one.
nccl() {
    ldconfig -p 2>/dev/null | grep -q libnccl.so.2 && return
    found=$(find / -name 'libnccl.so.2' -not -path '/proc/*' 2>/dev/null | head -n 1)
    [ -n "$found" ] || return 1
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
    engine | cluster | invariant | fp8 | sanitizer | races) echo 420 ;;
    ipc | table) echo 60 ;;
    sharing) echo 120 ;;
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

# Split against whole, with this model: KV by the best way there is, through the host's memory, and from a prefill worker on the CPU.
clusters() {
    model=$1 failed=0
    shift
    for how in "--transport auto" "--transport tcp" "--prefill-backend cpu"; do
        log=$out/cluster.$(echo "${model#*:}$how" | tr ' ' -).processes
        python3 "$@" --model "$model" $how --log "$log" >>"$out/cluster.jsonl" || failed=1
    done
    return $failed
}

part() {
    case $1 in
    conformance) "$here/gpu" conformance --no-hopper ;;
    hopper) "$here/gpu" conformance ;;
    models) "$here/models" on_a_gpu --nocapture ;;
    # Each case is named with its verdict. Panics of threads between them are no failures: cases make them.
    transports) "$here/models" between_pools_of_a_driver --nocapture ;;
    sanitizer) sanitized memcheck "${NO_HOPPER:+--no-hopper}" ;;
    # Of shared memory that copy units write it knows little.
    races) sanitized racecheck --no-hopper ;;
    kernels) "$here/gpu" bench --json ${NO_HOPPER:+--no-hopper} >"$out/kernels.jsonl" ;;
    # Each step says what it found; the first that is wrong ends it.
    sharing) "$here/gpu" sharing ;;
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
    text)
        if [ -e "$here/stories15m.gguf" ]; then
            python3 "$here/gpu-programs/text.py" "$here/baton" "$here/stories15m.gguf" --log "$out/text.processes" >"$out/text.jsonl"
        else
            lacks "stories15m.gguf, which was not packed"
        fi
        ;;
    ranks)
        # The test passes over itself where there are not two GPUs, and says so.
        if nccl; then "$here/ranks" ranks_on_gpus --nocapture; else lacks NCCL; fi
        ;;
    cluster)
        : >"$out/cluster.jsonl"
        failures=0
        for model in random:tiny random:smollm2-135m; do
            clusters $model "$here/gpu-programs/cluster.py" "$here/baton" || failures=1
        done
        return $failures
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
    models=$(test_program cuda on_a_gpu --release)
    # Finds or fetches UCX where the suite of transports runs.
    mkdir -p "$2/tools"
    cp "$root/tools/fetch-ucx" "$2/tools/"
    ranks=$(test_program tensor_parallel ranks_on_gpus --release)
    cp "$root/target/release/examples/gpu" "$root/target/release/baton" "$2/"
    cp "$root/$models" "$2/models"
    cp "$root/$ranks" "$2/ranks"
    for program in $PROGRAMS; do
        strip "$2/$program"
        embeds "$root/target/cuda/baton.fatbin" "$2/$program" || { echo "gpu.sh: $program was built without the kernels" >&2; exit 1; }
        gzip -f "$2/$program"
    done
    rm -f "$2/stories15m.gguf.gz"
    if command -v npm >/dev/null; then
        python3 "$here/gpu/stories.py" "$2/stories15m.gguf"
        gzip -f "$2/stories15m.gguf"
    else
        echo "gpu.sh: no npm to fetch the model of the part text with; it is left out" >&2
    fi
    # Reference data lies where the test was built. What another build's calls have found is not gone on with.
    rm -rf "$2/references" "$2/gpu-programs" "$2/out" "$2/results.tar.gz"
    cp -r "$here/references" "$2/references"
    cp -r "$here/gpu" "$2/gpu-programs"
    # What the table has beside what is measured.
    cp "$root/kernels/cuda/model.py" "$2/gpu-programs/"
    "$root/kernels/cuda/table" --needs >"$2/gpu-programs/needs.json"
    echo "$here" >"$2/built-at"
    cp "$here/gpu.sh" "$2/gpu.sh"
    size=$(du -sm "$2" | cut -f 1)
    echo "$2: $size MiB"
    [ "$size" -le 50 ] || { echo "gpu.sh: more than the 50 MiB that may be carried" >&2; exit 1; }
    ;;
run)
    shift
    ends=$(($(date +%s) + ${SECONDS_AT_MOST:-1000000}))
    libraries
    out=$here/out
    mkdir -p "$out"
    # What earlier calls have found.
    [ ! -e "$here/results.tar.gz" ] || tar -xzf "$here/results.tar.gz" -C "$out"
    if grep -q FAILED "$out/hopper.verdict" 2>/dev/null; then
        export NO_HOPPER=1 BATON_HOPPER_ATTENTION=false
    fi
    machine 2>&1 | tee "$out/machine.log"
    for program in $PROGRAMS; do
        [ ! -e "$here/$program.gz" ] || gunzip -f "$here/$program.gz"
        chmod +x "$here/$program"
    done
    [ ! -e "$here/stories15m.gguf.gz" ] || gunzip -f "$here/stories15m.gguf.gz"
    built=$(cat "$here/built-at")
    if [ ! -e "$built" ]; then
        mkdir -p "$(dirname "$built")"
        ln -s "$here" "$built"
    fi
    root=$(dirname "$built")
    mkdir -p "$root/transfer"
    [ -e "$root/tools" ] || ln -s "$here/tools" "$root/tools"
    status=0
    for part in ${*:-$PARTS}; do
        began=$(date +%s)
        most=$(limit "$part") left=$((ends - began))
        if [ "$left" -lt 20 ]; then
            echo "== $part: not begun, no time is left"
            status=1
            continue
        fi
        [ "$most" -le "$left" ] || most=$left
        # A part has a shell of its own, which ends at its first failure; the others go on. All that it has started ends with it.
        code=0
        timeout -k 10 "$most" sh "$here/gpu.sh" part "$part" >"$out/$part.log" 2>&1 || code=$?
        case $code in
        0) said=ok lines=12 ;;
        124 | 137) said="FAILED, took longer than $most s" lines=40 status=1 ;;
        *) said=FAILED lines=40 status=1 ;;
        esac
        # What a test says that passes over itself comes behind its name.
        if [ "$said" = ok ] && grep -q -e '^left out:' -e 'skipped: ' "$out/$part.log"; then said="left out"; fi
        if [ "$said" = ok ] && grep -q 'no UCX here' "$out/$part.log"; then said="ok, without UCX"; fi
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
        elif [ "$part" = hopper ]; then
            unset NO_HOPPER BATON_HOPPER_ATTENTION
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
    built=${CARGO_TARGET_DIR:-target}/debug
    # Conformance, transports and models on the host are among the tests already.
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
    "$built"/examples/gpu bench --host --json >"$out/kernels.jsonl"
    "$built"/examples/gpu sharing --host
    "$built"/examples/gpu handoff --host --json >"$out/ipc.jsonl"
    "$built"/baton bench engine --model random:tiny --json --no-profile --chunk 64 --decode-steps 4 \
        --metrics prefill_64,decode_1,decode_2 >"$out/engine.jsonl"
    clusters random:tiny "$here/gpu/cluster.py" "$built"/baton --backend cpu
    python3 "$here/gpu/cluster.py" "$built"/baton --backend cpu --model random:tiny --handoff 1500 --log "$out/log" \
        >"$out/handoff.jsonl"
    if python3 -c 'import torch, transformers' 2>/dev/null; then
        python3 "$here/gpu/peer.py" --tiny --context 32 --prefill 64 --steps 4 --batches 1,2 >"$out/peer.jsonl"
    fi
    python3 "$here/gpu/table.py" "$out"
    # On a host without a GPU: an error, no panic.
    if [ ! -e /dev/nvidiactl ]; then
        if "$built"/examples/gpu bench; then exit 1; fi
    fi
    ;;
*)
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
