# The few commands people need; `just` lists them.

default:
    @just --list

# A whole cluster on this machine
up *args:
    cargo run --release -- up {{ args }}

# The inner loop: format, scripts, dependencies, lints, unit and pure tests; no models, no kernels of a GPU, no clusters
quick:
    tools/quick

# All tests
test:
    cargo test --workspace

# All tests, and the 20 that took longest, as a table
slowest:
    tools/slowest

# Whole clusters simulated under random faults, one a seed; a release is held to 10,000
simulate seeds="10000":
    cargo run --release -p baton-simulator --example cluster -- {{ seeds }}

# Rules of the real code broken one at a time, each of which the simulation must notice; about half an hour on two cores
mutants *words:
    crates/simulator/mutants {{ words }}

# What CI leaves out, before a release: 10,000 simulated clusters, every rule broken, all prompts of the reference models, a real
# cluster under load and under memory pressure
soak seconds="600": simulate mutants
    cargo test --workspace --test parity_gguf --test killed --test routes -- --ignored
    cargo test -p baton-kernels --test cuda -- --ignored
    cargo run --release -p baton-tests --example soak -- --seconds {{ seconds }}
    cargo run --release -p baton-tests --example soak -- --pressure 40 --clients 16 --seconds {{ seconds }} --prompt 40 --answer 300

# Clients, harnesses and a fuzzer of APIs that are not ours, before a release; --reference adds 5 GB and lm-eval against transformers
clients *words:
    tests/clients/run {{ words }}

# Every fuzz target for so many seconds
fuzz seconds="600":
    cargo run --profile fuzz -p baton-fuzz -- all {{ seconds }}

# One fuzz target for so many seconds, guided by the code that inputs reach (libFuzzer)
fuzz-coverage target seconds="600":
    fuzz/libfuzzer/run {{ target }} {{ seconds }}

# What must be green before a change goes in
check:
    .ci/run

# Format
fmt:
    cargo fmt --all

# What is downloaded: an archive and a wheel, with checksums; --check tries them in an empty Debian 11
dist *words:
    tools/dist {{ words }}

# Speed against llama.cpp and against memcpy and TCP; both cores must be idle
bench:
    bench/run
