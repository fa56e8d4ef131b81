//! The ways KV travels in this suite, each with the devices it needs. Every case runs over every way.

use super::device::{BOTH, Devices, use_devices};
use super::*;

/// A transport, and which ends have their pools on a device.
#[derive(Clone, Copy)]
pub(super) struct Way {
    name: &'static str,
    choice: TransportChoice,
    devices: Devices,
}

pub(super) const CUDA_IPC: Way = Way { name: "cuda_ipc", choice: TransportChoice::CudaIpc, devices: BOTH };

/// From device to device, through staging memory on both sides.
pub(super) const TCP_BETWEEN_DEVICES: Way =
    Way { name: "tcp_between_devices", choice: TransportChoice::Tcp, devices: BOTH };

/// Straight from device to device.
pub(super) const UCX_BETWEEN_DEVICES: Way =
    Way { name: "ucx_between_devices", choice: TransportChoice::Ucx, devices: BOTH };

/// From a device's memory into a mapped pool.
pub(super) const SHM_FROM_A_DEVICE: Way =
    Way { name: "shm_from_a_device", choice: TransportChoice::Shm, devices: Devices { prefill: true, decode: false } };

impl Way {
    pub(super) fn run(self, test: fn(TransportChoice)) {
        use_devices(self.devices);
        test(self.choice);
    }
}

/// Makes a test of each function over each transport, and `CASES` of all functions.
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

/// One thing that a transport must do, over one of the ways between devices.
pub struct Case {
    way: Way,
    module: &'static str,
    name: &'static str,
    test: fn(TransportChoice),
}

impl Case {
    /// Its way, module and function, as in the names of this crate's own tests.
    pub fn name(&self) -> String {
        format!("{}::{}::{}", self.way.name, self.module, self.name)
    }

    /// Runs the case.
    ///
    /// # Panics
    /// When it fails.
    pub fn run(&self) {
        self.way.run(self.test);
    }
}

pub(super) type Cases = &'static [(&'static str, fn(TransportChoice))];

/// All cases between devices, and from a device into host memory. Those over UCX only where UCX is found.
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
