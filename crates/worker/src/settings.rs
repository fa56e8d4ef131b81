//! Checks of settings that are possible before the model is loaded. A wrong setting fails at once, with its field.

use std::time::Duration;

use baton_runtime::config::format_duration;
use baton_transfer::{Cpus, MAX_TCP_CONNECTIONS};

use crate::WorkerConfig;
use crate::choices::{BackendKind, Quantization};
use crate::error::{WorkerError, check};

/// Shortest TTL that every registry supports.
const MIN_TTL: Duration = Duration::from_secs(1);
/// Shortest allowed bound of transfers. A busy machine may need up to this long to wake a thread.
const LEAST_HEARTBEAT: Duration = Duration::from_millis(10);
/// Shortest time that a worker can be asked to keep.
const LEAST_SLO: Duration = Duration::from_micros(100);
/// Shortest allowed `step_timeout`: a large step can take this long.
const LEAST_STEP_TIMEOUT: Duration = Duration::from_secs(1);

/// Checks `transfer_cpus`: the process must be allowed to use them (a pod or a service may have fewer CPUs than its host), and no pinned
/// compute thread may run on one of them.
fn check_cpus(config: &WorkerConfig) -> Result<(), WorkerError> {
    let cpus = &config.transfers.transfer_cpus.0;
    let Ok(allowed) = Cpus::allowed() else { return Ok(()) };
    check(cpus.are_among(&allowed), "transfer_cpus", cpus, format!("among the CPUs this process may use, {allowed}"))?;
    let taken = if config.pin_threads { allowed.first(config.threads.unwrap_or(usize::MAX)) } else { Cpus::default() };
    let must = format!("none of {taken}, where pin_threads keeps the compute threads; lower threads, or name others");
    check(cpus.are_apart(&taken), "transfer_cpus", cpus, must)
}

/// The CPUs for transfers: those that are named, or else those that pinned compute threads leave, if any.
pub(crate) fn transfer_cpus(config: &WorkerConfig) -> Cpus {
    let named = &config.transfers.transfer_cpus.0;
    match Cpus::allowed() {
        Ok(allowed) if config.pin_threads && *named == Cpus::default() => {
            let left = allowed.without(&allowed.first(config.threads.unwrap_or(usize::MAX)));
            if left == Cpus::default() { allowed } else { left }
        }
        _ => named.clone(),
    }
}

/// Checks settings that are times. Of transfers (I5), a bound of zero would fail every handoff, and one missed heartbeat does not mean a
/// lost peer.
fn check_limits(config: &WorkerConfig) -> Result<(), WorkerError> {
    let bounds = [
        ("transfer_heartbeat", config.transfers.transfer_heartbeat, LEAST_HEARTBEAT),
        ("transfer_silence", config.transfers.transfer_silence, config.transfers.transfer_heartbeat.saturating_mul(3)),
        ("transfer_room", config.transfer_room, LEAST_HEARTBEAT),
        ("transfer_handshake", config.transfer_handshake, LEAST_HEARTBEAT),
        ("transfer_idle", config.transfer_idle, LEAST_HEARTBEAT),
        ("slo_ttft", config.slo_ttft, LEAST_SLO),
        ("slo_itl", config.slo_itl, LEAST_SLO),
    ];
    for (field, value, least) in bounds {
        let must = match field {
            "transfer_silence" => format!("at least {}, three times transfer_heartbeat", format_duration(least)),
            _ => format!("at least {}", format_duration(least)),
        };
        check(value >= least, field, format_duration(value), must)?;
    }
    check(
        config.transfers.transfer_sessions >= 1,
        "transfer_sessions",
        config.transfers.transfer_sessions,
        "at least 1",
    )?;
    Ok(())
}

/// Checks all that can be checked before the model is loaded.
pub fn check_settings(config: &WorkerConfig) -> Result<(), WorkerError> {
    let positive = |field, value: u32| check(value >= 1, field, value, "at least 1");
    check(
        config.kv.block_size >= 16 && config.kv.block_size.is_multiple_of(16),
        "block_size",
        config.kv.block_size,
        "a multiple of 16",
    )?;
    positive("chunk", config.chunk)?;
    positive("max_running", config.max_running)?;
    let fraction = config.gpu_memory_fraction;
    check(fraction > 0.0 && fraction <= 1.0, "gpu_memory_fraction", fraction, "above 0 and at most 1")?;
    let must = format!("at least max_running, which is {}", config.max_running);
    check(config.token_budget >= config.max_running, "token_budget", config.token_budget, must)?;
    let percent = config.max_kept_percent;
    check(percent <= 100, "max_kept_percent", percent, "at most 100")?;
    check(config.threads != Some(0), "threads", 0, "at least 1")?;
    check(config.kv.tp >= 1, "tp", config.kv.tp, "at least 1")?;
    let unshared = config.kv.tp <= 1 || !config.pin_threads;
    check(unshared, "pin_threads", true, "false with tp above 1: ranks would share pinned CPUs")?;
    if config.backend == BackendKind::Cpu {
        check_on_cpu(config)?;
    }
    let timeout = config.step_timeout.unwrap_or(LEAST_STEP_TIMEOUT);
    check(timeout >= LEAST_STEP_TIMEOUT, "step_timeout", format_duration(timeout), "at least 1s")?;
    let ttl = config.join.registry_ttl;
    check(ttl >= MIN_TTL, "registry_ttl", format_duration(ttl), "at least 1s")?;
    check_limits(config)?;
    let (connections, must) = (config.transfers.tcp_connections, format!("1 to {MAX_TCP_CONNECTIONS}"));
    check((1..=MAX_TCP_CONNECTIONS).contains(&connections), "tcp_connections", connections, must)?;
    let insecure = |field, address| config.internal_tls.check_listener(field, address);
    insecure("grpc", config.join.grpc)?;
    insecure("transfer", config.transfers.transfer)?;
    check_cpus(config)?;
    for (field, address) in
        [("grpc", config.join.grpc), ("transfer", config.transfers.transfer), ("admin", config.process.admin)]
    {
        let reachable = !address.ip().is_unspecified() || config.join.advertise.is_some();
        let must = "an address others can connect to; or say with --advertise by which one they reach this worker";
        check(reachable, field, address, must)?;
    }
    Ok(())
}

/// Refuses settings that the CPU backend does not support.
pub(crate) fn check_on_cpu(config: &WorkerConfig) -> Result<(), WorkerError> {
    let must = "none where the CPU computes, which takes a model's weights as they are; fp8 needs a GPU (backend cuda)";
    check(config.kv.quantization == Quantization::None, "quantization", config.kv.quantization, must)
}

#[cfg(test)]
mod tests {
    use baton_runtime::Parsed;

    use super::*;
    use crate::{KvConfig, TransferConfig};

    fn with(transfers: TransferConfig) -> WorkerConfig {
        WorkerConfig { transfers, ..WorkerConfig::default() }
    }

    #[test]
    fn there_are_no_more_connections_than_a_session_takes() {
        let refused = |tcp_connections| {
            let config = with(TransferConfig { tcp_connections, ..TransferConfig::default() });
            check_settings(&config).map_err(|error| error.to_string())
        };
        assert_eq!([1, 16].map(refused), [Ok(()), Ok(())]);
        for count in [0, 17] {
            assert_eq!(refused(count), Err(format!("tcp_connections is {count}; it must be 1 to 16")));
        }
    }

    #[test]
    fn transfer_threads_run_on_cpus_that_there_are() {
        let refused = |cpus: &str| {
            let config =
                with(TransferConfig { transfer_cpus: Parsed(cpus.parse().unwrap()), ..TransferConfig::default() });
            check_settings(&config).map_err(|error| error.to_string())
        };
        let allowed = Cpus::allowed().unwrap().to_string();
        assert_eq!(["", &allowed].map(refused), [Ok(()), Ok(())]);
        let refused_pinned = |threads: usize| {
            let transfer_cpus = Parsed(Cpus::allowed().unwrap().first(1));
            let config = with(TransferConfig { transfer_cpus, ..TransferConfig::default() });
            check_settings(&WorkerConfig { threads: Some(threads), pin_threads: true, ..config })
                .map_err(|error| error.to_string())
        };
        let all = Cpus::allowed().unwrap();
        let left = |threads: usize, pin_threads: bool| {
            transfer_cpus(&WorkerConfig { threads: Some(threads), pin_threads, ..WorkerConfig::default() })
        };
        assert_eq!(left(1, false), Cpus::default());
        assert!(left(1, true).are_apart(&all.first(1)) || all.first(1) == all, "{}", left(1, true));
        assert_eq!(left(9999, true), all, "there are none left: any");
        let error = refused_pinned(1).unwrap_err();
        assert!(error.contains("where pin_threads keeps the compute threads; lower threads"), "{error}");
        let all = "transfer_cpus is 0-1023; it must be among the CPUs this process may use, ";
        assert_eq!(refused("0-1023"), Err(format!("{all}{allowed}")));
    }

    #[test]
    fn bounds_of_transfers_are_long_enough_to_mean_something() {
        let ms = Duration::from_millis;
        let refused = |heartbeat, silence, room, handshake| {
            let times = TransferConfig {
                transfer_heartbeat: ms(heartbeat),
                transfer_silence: ms(silence),
                ..TransferConfig::default()
            };
            let config = WorkerConfig { transfer_room: ms(room), transfer_handshake: ms(handshake), ..with(times) };
            check_settings(&config).map(|()| config.transfer_limits().silence).map_err(|error| error.to_string())
        };
        assert_eq!(refused(100, 300, 10, 10), Ok(ms(300)));
        for (asked, want) in [
            (
                (100, 299, 10, 10),
                "transfer_silence is 299ms; it must be at least 300ms, three times transfer_heartbeat",
            ),
            ((0, 299, 10, 10), "transfer_heartbeat is 0s"),
            ((100, 300, 9, 10), "transfer_room is 9ms"),
            ((100, 300, 10, 0), "transfer_handshake is 0s"),
        ] {
            let (heartbeat, silence, room, handshake) = asked;
            let error = refused(heartbeat, silence, room, handshake).unwrap_err();
            assert!(error.starts_with(want), "{error}");
        }
    }

    #[test]
    fn ranks_share_the_cpus_or_have_a_gpu_each() {
        let config = |tp, backend, pin_threads| {
            let config = WorkerConfig {
                kv: KvConfig { tp, ..KvConfig::default() },
                backend,
                pin_threads,
                ..WorkerConfig::default()
            };
            check_settings(&config).map_err(|error| error.to_string())
        };
        assert_eq!(config(4, BackendKind::Cpu, false), Ok(()));
        assert_eq!(config(1, BackendKind::Auto, true), Ok(()));
        assert_eq!(config(2, BackendKind::Cuda, false), Ok(()));
        for (tp, backend, pinned, wrong) in [
            (0, BackendKind::Cpu, false, "tp is 0; it must be at least 1"),
            (2, BackendKind::Cpu, true, "pin_threads is true; it must be false with tp above 1"),
        ] {
            let error = config(tp, backend, pinned).unwrap_err();
            assert!(error.starts_with(wrong), "{error}");
        }
    }
}
