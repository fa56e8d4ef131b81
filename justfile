# The few commands people need; `just` lists them.

default:
    @just --list

# A whole cluster on this machine
up *args:
    cargo run --release -- up {{ args }}

# All tests
test:
    cargo test --workspace

# 100,000 simulated handoffs under random faults from 1,000 seeds
simulate seeds="1000":
    cargo run --release -p baton-simulator --example handoffs -- {{ seeds }}

# Every fuzz target for so many seconds
fuzz seconds="600":
    cargo run --profile fuzz -p baton-fuzz -- all {{ seconds }}

# What must be green before a change goes in
check:
    .ci/run

# Format
fmt:
    cargo fmt --all

# Speed against llama.cpp and against memcpy and TCP; both cores must be idle
bench:
    bench/run
