//! The life of shared memory, with a host's stand-in for the driver that records every call: export, import, close, peers that die, refusals.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use super::*;
use crate::cuda::host::{HostMemory, MemoryCall as Call, Why};
use crate::cuda::{Held, receive_handle, send_handle};

const BYTES: usize = 100_000;
/// What 100,000 bytes take.
const ROUNDED: usize = 128 << 10;

/// A process's memory, and the calls for it.
#[derive(Default)]
struct Side {
    shared: SharedMemory,
    calls: HostMemory,
}

impl Side {
    fn allocate(&mut self) -> Address {
        self.shared.allocate(&self.calls, BYTES).unwrap()
    }

    /// Whether there was something to free.
    fn free(&mut self, at: Address) -> bool {
        let memory = self.shared.disown(at);
        memory.map(|memory| memory.free(&self.calls)).is_some()
    }

    fn export(&self, at: Address) -> PoolHandle {
        self.shared.export(&self.calls, at).unwrap()
    }

    fn import(&mut self, handle: PoolHandle) -> Result<(Address, OpenedBy), String> {
        self.shared.import(&self.calls, handle, BYTES).map_err(|error| error.to_string())
    }

    /// Asserts that it holds nothing and has made no mistake.
    fn is_clean(&self) {
        assert_eq!(self.calls.held(), Held::default());
        assert_eq!(self.calls.problems(), [""; 0]);
    }
}

fn byte(at: Address, offset: usize) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut::<u8>(at.0 as usize).wrapping_add(offset)
}

/// Writes a byte that the other side then reads.
fn goes(from: Address, to: Address, value: u8) -> bool {
    // SAFETY: both are mapped, and nobody else uses them.
    unsafe {
        byte(from, BYTES - 1).write_volatile(value);
        byte(to, BYTES - 1).read_volatile() == value
    }
}

/// Open descriptors of this process. Other tests run beside this one, so it only says something over many rounds.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn memory_is_exported_imported_and_closed() {
    let (mut decode, mut prefill) = (Side::default(), Side::default());
    let at = decode.allocate();
    assert_eq!(decode.calls.take_log(), [Call::Names, Call::Create, Call::Reserve, Call::Map, Call::Allow]);
    assert_eq!(decode.shared.exported_as(at), "descriptor");
    let handle = decode.export(at);
    assert_eq!(decode.calls.take_log(), [Call::Descriptor]);

    let (there, by) = prefill.import(handle).unwrap();
    assert_eq!(by, OpenedBy::Descriptor);
    let taken = [Call::ByDescriptor, Call::Reserve, Call::Map, Call::Allow, Call::Release];
    assert_eq!(prefill.calls.take_log(), taken, "the mapping alone keeps the memory");
    assert!(there != at && goes(there, at, 7) && goes(at, there, 8));
    assert_eq!(prefill.calls.held(), Held { memory: 0, reserved: 1, mapped: 1 });

    prefill.shared.close(&prefill.calls, there);
    assert_eq!(prefill.calls.take_log(), [Call::Unmap, Call::Vacate], "I3: the mapping ends before its addresses go");
    prefill.shared.close(&prefill.calls, there);
    assert_eq!(prefill.calls.take_log(), [], "an import is closed once");
    assert!(decode.free(at));
    assert_eq!(decode.calls.take_log(), [Call::WaitForAll, Call::Unmap, Call::Vacate, Call::Release]);
    assert!(!decode.free(at), "it is freed once");
    prefill.is_clean();
    decode.is_clean();
}

#[test]
fn sizes_are_whole_units_and_importers_map_all_of_them() {
    let mut side = Side::default();
    for bytes in [1, ROUNDED, ROUNDED + 1] {
        let at = side.shared.allocate(&side.calls, bytes).unwrap();
        let Some(Handle::Physical(said)) = Handle::parse(&side.export(at).bytes) else { panic!("physical memory") };
        assert_eq!(said.bytes as usize, bytes.next_multiple_of(64 << 10));
        side.free(at);
    }
    let too_many = side.shared.allocate(&side.calls, usize::MAX);
    assert!(matches!(too_many, Err(KernelError::Memory { bytes: usize::MAX })));
    side.is_clean();
}

/// The owner may free its memory, or die, while a peer copies into it: the peer reaches that memory and no other (I3).
#[test]
fn memory_outlives_its_owner_while_a_peer_has_it() {
    let (mut decode, mut prefill) = (Side::default(), Side::default());
    let at = decode.allocate();
    let handle = decode.export(at);
    decode.free(at);
    decode.is_clean();
    let (there, _) = prefill.import(handle).expect("a descriptor on its way keeps the memory");
    assert!(goes(there, there, 3));
    prefill.shared.close(&prefill.calls, there);
    prefill.is_clean();
}

/// Whatever step fails, an import leaves no memory, addresses or descriptors behind, and the next one works.
#[test]
fn an_import_that_fails_leaves_nothing_behind() {
    let mut decode = Side::default();
    let at = decode.allocate();
    let before = descriptors();
    for _ in 0..50 {
        for call in [Call::ByDescriptor, Call::Reserve, Call::Map, Call::Allow] {
            let mut prefill = Side::default();
            prefill.calls.refuse(call, Why::NotSupported);
            let error = prefill.import(decode.export(at)).unwrap_err();
            assert!(error.contains("NOT_SUPPORTED"), "{error}");
            prefill.is_clean();
        }
    }
    assert!(descriptors() < before + 50, "descriptors leak: {before} before");
    let mut prefill = Side::default();
    let (there, _) = prefill.import(decode.export(at)).unwrap();
    prefill.shared.close(&prefill.calls, there);
    prefill.is_clean();
}

#[test]
fn an_allocation_that_fails_leaves_nothing_behind() {
    for call in [Call::Create, Call::Reserve, Call::Map, Call::Allow] {
        let mut side = Side::default();
        side.calls.refuse(call, Why::NoMemory);
        assert!(matches!(side.shared.allocate(&side.calls, BYTES), Err(KernelError::Memory { .. })), "{call:?}");
        assert!(!side.calls.take_log().contains(&Call::AllocateLegacy), "there is no more room for that");
        side.is_clean();
    }
}

#[test]
fn a_driver_that_refuses_gets_legacy_handles_and_the_reason_is_told() {
    for call in [Call::Names, Call::Create, Call::Map, Call::Allow] {
        let mut side = Side::default();
        side.calls.refuse(call, Why::NotSupported);
        let at = side.allocate();
        let told = side.shared.exported_as(at);
        assert!(told.starts_with("legacy CUDA IPC handle: ") && told.contains("NOT_SUPPORTED"), "{told}");
        let handle = side.export(at);
        assert!(handle.descriptor.is_none());
        assert_eq!(side.import(handle), Ok((at, OpenedBy::Legacy)), "a process does not open its own handle");
        side.shared.close(&side.calls, at);
        assert!(!side.calls.take_log().contains(&Call::CloseLegacy));
        side.free(at);
        assert_eq!(side.calls.take_log(), [Call::FreeLegacy]);
        side.is_clean();
    }
}

#[test]
fn fabric_names_are_asked_for_where_there_are_any_and_used_where_descriptors_fail() {
    let (mut decode, mut prefill) = (Side::default(), Side::default());
    decode.calls = HostMemory::with_fabric();
    let at = decode.allocate();
    assert_eq!(decode.shared.exported_as(at), "descriptor, fabric handle");
    let (there, by) = prefill.import(decode.export(at)).unwrap();
    assert_eq!(by, OpenedBy::Descriptor, "it needs nothing else");
    prefill.shared.close(&prefill.calls, there);
    let lost = PoolHandle { descriptor: None, ..decode.export(at) };
    let (there, by) = prefill.import(lost).unwrap();
    assert_eq!(by, OpenedBy::Fabric);
    assert!(goes(there, at, 5));
    prefill.shared.close(&prefill.calls, there);
    prefill.is_clean();

    // As a driver does for a process without a channel of the fabric.
    let mut without = Side { calls: HostMemory::with_fabric(), ..Side::default() };
    without.calls.refuse(Call::CreateWithFabric, Why::NotSupported);
    let at = without.allocate();
    assert_eq!(without.shared.exported_as(at), "descriptor");
    // One that may create such memory but not name it.
    decode.calls.refuse(Call::Fabric, Why::NotSupported);
    let at = decode.allocate();
    assert!(prefill.import(decode.export(at)).is_ok());
}

#[test]
fn handles_that_name_nothing_are_errors_that_say_why() {
    let (mut decode, mut prefill) = (Side::default(), Side::default());
    let at = decode.allocate();
    let mut said = |bytes: Vec<u8>, descriptor: Option<OwnedFd>| {
        let error = prefill.import(PoolHandle { bytes, descriptor }).unwrap_err();
        prefill.is_clean();
        error
    };
    let PoolHandle { bytes, descriptor } = decode.export(at);
    assert!(said(b"nothing of the kind".to_vec(), None).contains("no handle"));
    assert!(said(bytes.clone(), None).contains("descriptor did not come"));
    let null = std::fs::File::open("/dev/null").unwrap();
    assert!(said(bytes.clone(), Some(null.into())).contains("no memory's descriptor"));
    let Some(Handle::Physical(honest)) = Handle::parse(&bytes) else { panic!("physical memory") };
    let with = |handle: Physical| Handle::Physical(handle).encode();
    // More than there is, more than can be addressed, and less than is needed.
    for bytes in [honest.bytes * 2, 1 << 62, u64::MAX, 64 << 10, 0] {
        let error =
            said(with(Physical { bytes, ..honest.clone() }), Some(descriptor.as_ref().unwrap().try_clone().unwrap()));
        assert!(error.contains("INVALID_VALUE") || error.contains("needed") || error.contains("reserving"), "{error}");
    }
    let elsewhere = with(Physical { device: [0; 16], ..honest });
    assert!(said(elsewhere, None).ends_with("this process does not see the peer's GPU"));
}

#[test]
fn a_legacy_allocation_that_is_too_small_is_closed_again() {
    let (mut decode, mut prefill) = (Side::default(), Side::default());
    decode.calls.refuse(Call::Names, Why::NotSupported);
    let at = decode.allocate();
    let Some(Handle::Legacy(own)) = Handle::parse(&decode.export(at).bytes) else { panic!("legacy") };
    // As from another process.
    let foreign = |offset| {
        let bytes = Handle::Legacy(Legacy { process: own.process + 1, offset, ..own.clone() }).encode();
        PoolHandle { bytes, descriptor: None }
    };
    let (there, by) = prefill.import(foreign(0)).unwrap();
    assert!(by == OpenedBy::Legacy && there != at && goes(there, at, 9));
    assert!(prefill.import(foreign(8)).unwrap_err().contains("are needed"));
    prefill.shared.close(&prefill.calls, there);
    let opened = [Call::OpenLegacy, Call::OpenLegacy, Call::CloseLegacy, Call::CloseLegacy];
    assert_eq!(prefill.calls.take_log(), opened);
    prefill.is_clean();
}

/// Tells a child of this program what to be.
const ROLE: &str = "BATON_SHARED_MEMORY_ROLE";

/// A child of this program, with a socket as its input.
struct Peer {
    child: Child,
    socket: UnixStream,
}

impl Peer {
    fn start(role: &str) -> Peer {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "cuda::sharing::memory::tests::child", "--nocapture"])
            .env(ROLE, role)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Peer { child, socket: ours }
    }

    /// Waits until it says this word.
    fn says(&mut self, word: &str) {
        let out = BufReader::new(self.child.stdout.as_mut().unwrap());
        assert!(out.lines().any(|line| line.unwrap().ends_with(word)), "the child ends without saying {word}");
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test: the other process of the tests below.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut side = Side::default();
    match role.as_str() {
        "decode" => {
            let at = side.allocate();
            send_handle(&socket, &side.export(at)).unwrap();
            println!("sent");
            // Until the other end closes, or this process is killed.
            let _ = (&socket).read(&mut [0]);
        }
        _ => {
            let (at, by) = side.import(receive_handle(&socket).unwrap()).unwrap();
            assert_eq!(by, OpenedBy::Descriptor);
            // SAFETY: it is mapped, and the other process only looks at it later.
            unsafe { byte(at, BYTES - 1).write_volatile(42) };
            println!("written");
            let _ = (&socket).read(&mut [0]);
        }
    }
}

/// The decode worker dies with its handle on the way, then with its pool mapped here: neither is an error, and nothing is left.
#[test]
fn an_exporter_that_dies_takes_nothing_from_its_peer() {
    for (dies_first, value) in [(true, 1), (false, 2)] {
        let (mut peer, mut prefill) = (Peer::start("decode"), Side::default());
        peer.says("sent");
        if dies_first {
            peer.kill();
        }
        let (there, _) = prefill.import(receive_handle(&peer.socket).unwrap()).expect("its memory lives on");
        peer.kill();
        assert!(goes(there, there, value), "copies under way reach memory that is nobody else's");
        prefill.shared.close(&prefill.calls, there);
        prefill.is_clean();
    }
}

/// A prefill worker dies with the pool mapped, and one before it has taken the handle: the pool stays as it is, and takes the next peer.
#[test]
fn an_importer_that_dies_leaves_the_pool_as_it_is() {
    let mut decode = Side::default();
    let at = decode.allocate();
    let before = descriptors();
    for _ in 0..2 {
        let mut peer = Peer::start("prefill");
        send_handle(&peer.socket, &decode.export(at)).unwrap();
        peer.says("written");
        // SAFETY: it is mapped, and the peer has written.
        assert_eq!(unsafe { byte(at, BYTES - 1).read_volatile() }, 42);
        peer.kill();
        // SAFETY: nobody else has it any more.
        unsafe { byte(at, BYTES - 1).write_volatile(0) };
    }
    for _ in 0..50 {
        let (ours, theirs) = UnixStream::pair().unwrap();
        send_handle(&ours, &decode.export(at)).unwrap();
        drop(theirs);
    }
    assert!(descriptors() < before + 40, "descriptors leak: {before} before");
    decode.free(at);
    decode.is_clean();
}
