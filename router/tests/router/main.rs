//! A router over real sockets, with workers that are made up.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod support;

mod allocations;
mod api;
mod budget;
mod classes;
mod false_workers;
mod fetching;
mod following;
mod grpc;
mod keyless;
mod late;
mod listeners;
mod logprobs;
mod models;
mod public_tls;
mod reasoning;
mod recall;
mod recovery;
mod refused;
mod responses;
mod serving;
mod shares;
mod stalls;
mod structured;
mod tenants;
