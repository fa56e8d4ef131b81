//! [`Handle`]: what the bytes of an exported pool's handle say.
//!
//! There are two forms. That of physical memory begins with [`MAGIC`]; bytes behind its last field belong to later versions. A legacy
//! handle has exactly 92 bytes and begins with a random number. Earlier versions know that form only.

use std::sync::OnceLock;

use baton_types::random_u64;

/// A device's id, the same in every process that sees the device.
pub(in crate::cuda) type DeviceId = [u8; 16];
/// A name of physical memory that the driver issues for GPUs of one NVLink fabric.
pub(in crate::cuda) type Fabric = [u8; 64];

const MAGIC: [u8; 4] = *b"cum1";

/// A random number that tells this process from all others.
pub(super) fn this_process() -> u64 {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    *NUMBER.get_or_init(random_u64)
}

/// What names an exported pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Handle {
    Physical(Physical),
    Legacy(Legacy),
}

/// Physical memory: a file descriptor beside the handle names it, and a fabric name where there is one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Physical {
    /// The exporting process, and the memory's address there: they tell it from all other memory.
    pub process: u64,
    pub at: u64,
    /// The device that it is on.
    pub device: DeviceId,
    /// Its size in bytes, a multiple of the granularity it was created with.
    pub bytes: u64,
    pub fabric: Option<Fabric>,
}

/// An allocation by the driver's inter-process handle. The driver's handle names a whole allocation, whose base may lie before the
/// exported memory. A process cannot open a handle that it exported itself; it takes the address from the handle instead.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Legacy {
    /// The exporting process, its number of the device, and the memory's address there.
    pub process: u64,
    pub device: i32,
    pub at: u64,
    /// Where the memory begins in its allocation.
    pub offset: u64,
    /// The driver's own handle.
    pub opaque: [u8; 64],
}

impl Handle {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Handle::Physical(Physical { process, at, device, bytes, fabric }) => {
                out.extend(MAGIC);
                out.extend(process.to_le_bytes());
                out.extend(at.to_le_bytes());
                out.extend(device);
                out.extend(bytes.to_le_bytes());
                out.push(u8::from(fabric.is_some()));
                out.extend(fabric.iter().flatten());
            }
            Handle::Legacy(Legacy { process, device, at, offset, opaque }) => {
                out.extend(process.to_le_bytes());
                out.extend(device.to_le_bytes());
                out.extend(at.to_le_bytes());
                out.extend(offset.to_le_bytes());
                out.extend(opaque);
            }
        }
        out
    }

    /// None: it is no handle.
    pub fn parse(bytes: &[u8]) -> Option<Handle> {
        match bytes.starts_with(&MAGIC) {
            true => parse_physical(bytes).map(Handle::Physical),
            false => parse_legacy(bytes).map(Handle::Legacy),
        }
    }
}

fn parse_physical(bytes: &[u8]) -> Option<Physical> {
    let rest = bytes.strip_prefix(&MAGIC)?;
    let (process, rest) = rest.split_first_chunk()?;
    let (at, rest) = rest.split_first_chunk()?;
    let (device, rest) = rest.split_first_chunk()?;
    let (bytes, rest) = rest.split_first_chunk()?;
    let (has_fabric, rest) = rest.split_first()?;
    let fabric = match has_fabric {
        0 => None,
        _ => Some(*rest.first_chunk()?),
    };
    let [process, at, bytes] = [process, at, bytes].map(|number| u64::from_le_bytes(*number));
    Some(Physical { process, at, device: *device, bytes, fabric })
}

fn parse_legacy(bytes: &[u8]) -> Option<Legacy> {
    let (process, rest) = bytes.split_first_chunk()?;
    let (device, rest) = rest.split_first_chunk()?;
    let (at, rest) = rest.split_first_chunk()?;
    let (offset, rest) = rest.split_first_chunk()?;
    Some(Legacy {
        process: u64::from_le_bytes(*process),
        device: i32::from_le_bytes(*device),
        at: u64::from_le_bytes(*at),
        offset: u64::from_le_bytes(*offset),
        opaque: *<&[u8; 64]>::try_from(rest).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_survive_and_other_bytes_are_none() {
        let legacy = Legacy { process: this_process(), device: 1, at: 1 << 40, offset: 512, opaque: [7; 64] };
        let plain = Physical { process: 5, at: 1 << 40, device: [3; 16], bytes: 6 << 20, fabric: None };
        let fabric = Physical { fabric: Some([9; 64]), ..plain.clone() };
        for handle in [Handle::Legacy(legacy), Handle::Physical(plain), Handle::Physical(fabric)] {
            let bytes = handle.encode();
            assert_eq!(Handle::parse(&bytes), Some(handle.clone()));
            for end in 0..bytes.len() {
                assert_eq!(Handle::parse(&bytes[..end]), None, "{handle:?} cut to {end}");
            }
        }
    }

    /// What workers of before know: 92 bytes, in this order.
    #[test]
    fn a_legacy_handle_is_as_it_was() {
        let legacy = Legacy { process: 1, device: 2, at: 3, offset: 4, opaque: [5; 64] };
        let mut bytes = [1u64.to_le_bytes().as_slice(), &2i32.to_le_bytes(), &3u64.to_le_bytes()].concat();
        bytes.extend([4u64.to_le_bytes().as_slice(), &[5; 64]].concat());
        assert_eq!(Handle::Legacy(legacy).encode(), bytes);
        assert_eq!(bytes.len(), 92);
    }

    #[test]
    fn what_a_later_version_adds_is_skipped() {
        let handle = Handle::Physical(Physical { process: 5, at: 6, device: [3; 16], bytes: 8, fabric: None });
        let longer = [handle.encode().as_slice(), b"more"].concat();
        assert_eq!(Handle::parse(&longer), Some(handle));
    }
}
