//! The ways that KV goes in this suite, each with the devices that it needs, and every case of it over each.

use super::device::{BOTH, Devices, use_devices};
use super::*;

/// A transport between ends of which some have their pools on a device.
#[derive(Clone, Copy)]
pub(super) struct Way {
    name: &'static str,
    choice: TransportChoice,
    devices: Devices,
}

pub(super) const CUDA_IPC: Way = Way { name: "cuda_ipc", choice: TransportChoice::CudaIpc, devices: BOTH };

/// Out of a device's memory and into one's, through staging memory on both sides.
pub(super) const TCP_BETWEEN_DEVICES: Way =
    Way { name: "tcp_between_devices", choice: TransportChoice::Tcp, devices: BOTH };

/// Straight out of a device's memory and into one's.
pub(super) const UCX_BETWEEN_DEVICES: Way =
    Way { name: "ucx_between_devices", choice: TransportChoice::Ucx, devices: BOTH };

/// Out of a device's memory into a mapped pool.
pub(super) const SHM_FROM_A_DEVICE: Way =
    Way { name: "shm_from_a_device", choice: TransportChoice::Shm, devices: Devices { prefill: true, decode: false } };

impl Way {
    pub(super) fn run(self, test: fn(TransportChoice)) {
        use_devices(self.devices);
        test(self.choice);
    }
}

/// Makes a test of each function for each transport, and `CASES` of all of them.
macro_rules! for_each_transport {
    ($($name:ident),* $(,)?) => {
        pub(super) const CASES: crate::conformance::ways::Cases = &[$((stringify!($name), $name)),*];

        #[cfg(test)]
        mod shm {
            $(#[test] fn $name() { super::$name(crate::TransportChoice::Shm) })*
        }
        #[cfg(test)]
        mod tcp {
            $(#[test] fn $name() { super::$name(crate::TransportChoice::Tcp) })*
        }
        #[cfg(test)]
        mod tls {
            $(#[test] fn $name() { crate::conformance::with_tls(|| super::$name(crate::TransportChoice::Tcp)) })*
        }
        #[cfg(test)]
        mod tcp_connections {
            $(#[test] fn $name() { crate::conformance::with_connections(3, || super::$name(crate::TransportChoice::Tcp)) })*
        }
        #[cfg(test)]
        mod ucx {
            $(#[test] fn $name() {
                if crate::conformance::ucx_is_here() {
                    super::$name(crate::TransportChoice::Ucx)
                }
            })*
        }
        #[cfg(test)]
        mod cuda_ipc {
            $(#[test] fn $name() { crate::conformance::ways::CUDA_IPC.run(super::$name) })*
        }
        #[cfg(test)]
        mod tcp_between_devices {
            $(#[test] fn $name() { crate::conformance::ways::TCP_BETWEEN_DEVICES.run(super::$name) })*
        }
        #[cfg(test)]
        mod ucx_between_devices {
            $(#[test] fn $name() {
                if crate::conformance::ucx_is_here() {
                    crate::conformance::ways::UCX_BETWEEN_DEVICES.run(super::$name)
                }
            })*
        }
        #[cfg(test)]
        mod shm_from_a_device {
            $(#[test] fn $name() { crate::conformance::ways::SHM_FROM_A_DEVICE.run(super::$name) })*
        }
    };
}
pub(super) use for_each_transport;

/// One thing that a transport must do, on one of the ways between devices.
pub struct Case {
    way: Way,
    module: &'static str,
    name: &'static str,
    test: fn(TransportChoice),
}

impl Case {
    /// The way, the module and what must hold, as this crate's own tests have them.
    pub fn name(&self) -> String {
        format!("{}::{}::{}", self.way.name, self.module, self.name)
    }

    /// Holds it to that.
    ///
    /// # Panics
    /// When it does not.
    pub fn run(&self) {
        self.way.run(self.test);
    }
}

pub(super) type Cases = &'static [(&'static str, fn(TransportChoice))];

/// Everything that goes between devices, and out of one into host memory: over UCX only where it is found.
pub fn cases() -> Vec<Case> {
    let modules: [(&str, Cases); 6] = [
        ("changed", changed::CASES),
        ("endings", endings::CASES),
        ("handoffs", handoffs::CASES),
        ("misdelivered", misdelivered::CASES),
        ("processes", processes::CASES),
        ("types", types::CASES),
    ];
    let mut ways = vec![CUDA_IPC, TCP_BETWEEN_DEVICES, SHM_FROM_A_DEVICE];
    ways.extend(ucx_is_here().then_some(UCX_BETWEEN_DEVICES));
    let case = |way| {
        modules
            .into_iter()
            .flat_map(move |(module, cases)| cases.iter().map(move |&(name, test)| Case { way, module, name, test }))
    };
    ways.into_iter().flat_map(case).collect()
}
