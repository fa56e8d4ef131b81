//! Passes a pool's handle to another process over a unix socket, for tests and benchmarks. Workers pass theirs in a session's frames.

use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use baton_types::PoolHandle;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

/// Sends a handle, and its descriptor with its first byte.
pub fn send_handle(mut socket: &UnixStream, handle: &PoolHandle) -> std::io::Result<()> {
    let length = (handle.bytes.len() as u32).to_le_bytes();
    let fds: Vec<_> = handle.descriptor.iter().map(|fd| fd.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(&length)], &mut control, SendFlags::NOSIGNAL)?;
    if sent < length.len() {
        return Err(ErrorKind::WriteZero.into());
    }
    std::io::Write::write_all(&mut socket, &handle.bytes)
}

/// Receives what [`send_handle`] has sent.
pub fn receive_handle(mut socket: &UnixStream) -> std::io::Result<PoolHandle> {
    let (mut length, mut descriptor) = ([0; 4], None);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message =
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut length)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = part {
            descriptor = fds.last();
        }
    }
    if message.bytes < length.len() {
        return Err(Error::from(ErrorKind::UnexpectedEof));
    }
    let mut bytes = vec![0; u32::from_le_bytes(length).min(1 << 20) as usize];
    socket.read_exact(&mut bytes)?;
    Ok(PoolHandle { bytes, descriptor })
}
