#!/bin/sh
# All that is checked and measured on a GPU, in two parts, since a machine with one may have no compiler:
#
#   tests/gpu.sh pack DIR    here: compiles the kernels and the programs, and puts what is needed into DIR
#   DIR/gpu.sh run           on the machine with the GPU: conformance of every operation, logits of every architecture against the CPU's,
#                            then the table of bandwidths and products; output in DIR/out as well
#   tests/gpu.sh host        the table with the kernels compiled for this processor: that the program works, not how fast
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
mode=${1:-}

# The programs: the example, and the test of whole models by the name that cargo gave it.
programs() {
    cargo build "$@" -p baton-kernels --example gpu
    said=$(cargo test "$@" -p baton-tests --test cuda --no-run 2>&1) || { echo "$said" >&2; return 1; }
    echo "$said" | sed -n 's/.*(\(.*\/deps\/cuda-[0-9a-f]*\)).*/\1/p'
}

# CUDA's libraries where the system does not look: those that come with Python packages.
libraries() {
    ldconfig -p 2>/dev/null | grep -q libcublasLt.so.13 && return
    found=$(find / -name 'libcublasLt.so.13' -not -path '/proc/*' 2>/dev/null | head -n 1)
    [ -n "$found" ] || { echo "gpu.sh: this machine has no libcublasLt.so.13; install CUDA 13's libraries" >&2; exit 1; }
    export LD_LIBRARY_PATH="$(dirname "$found")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
}

case $mode in
pack)
    [ $# = 2 ] || { echo "usage: tests/gpu.sh pack DIR" >&2; exit 2; }
    root=$(dirname "$here")
    mkdir -p "$2"
    "$root/kernels/cuda/build"
    models=$(cd "$root" && programs --release)
    cp "$root/target/release/examples/gpu" "$2/gpu"
    cp "$root/$models" "$2/models"
    # Reference data lies where the test was built.
    rm -rf "$2/references"
    cp -r "$here/references" "$2/references"
    echo "$here" >"$2/built-at"
    cp "$here/gpu.sh" "$2/gpu.sh"
    strip "$2/gpu" "$2/models"
    du -sh "$2"
    ;;
run)
    libraries
    built=$(cat "$here/built-at")
    if [ ! -e "$built" ]; then
        mkdir -p "$(dirname "$built")"
        ln -s "$here" "$built"
    fi
    mkdir -p "$here/out"
    status=0
    for part in "gpu conformance" "models on_a_gpu --nocapture" "gpu bench"; do
        echo "== $part"
        # shellcheck disable=SC2086
        "$here"/$part >"$here/out/last" 2>&1 || status=1
        cat "$here/out/last"
        cat "$here/out/last" >>"$here/out/log"
    done
    exit $status
    ;;
host)
    root=$(dirname "$here")
    cd "$root"
    programs >/dev/null
    # Conformance and models on the host are among the tests already.
    target/debug/examples/gpu bench --host
    # On a host without a GPU: an error, no panic.
    if [ ! -e /dev/nvidiactl ]; then
        if target/debug/examples/gpu bench; then exit 1; fi
    fi
    ;;
*)
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
