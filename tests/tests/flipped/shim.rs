//! Not part of a test: compiled by one, and loaded into a cluster's processes before the C library. UCX sends blocks by
//! `send` and `sendmsg`; while a file is there, one bit of the next large message is flipped on its way to the kernel, and the
//! file removed. KV that Baton itself sends does not go through the C library, and other messages are small.

use std::ffi::{OsString, c_int, c_long, c_void};
use std::fs::File;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Part {
    start: *const u8,
    len: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Message {
    name: *const c_void,
    name_len: u32,
    parts: *const Part,
    count: usize,
    control: *const c_void,
    control_len: usize,
    flags: c_int,
}

unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
}

#[cfg(target_arch = "x86_64")]
const SENDMSG: c_long = 46;
#[cfg(not(target_arch = "x86_64"))]
const SENDMSG: c_long = 211;

/// Only blocks are as large as this.
const LARGE: usize = 4096;
/// Behind UCX's own header.
const AT: usize = 100;

/// The file, which was there until now.
fn armed() -> Option<OsString> {
    std::env::var_os("BATON_TEST_FLIP").filter(|file| std::fs::remove_file(file).is_ok())
}

/// As in the C library.
///
/// # Safety
/// As in the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(socket: c_int, message: *const Message, flags: c_int) -> isize {
    // SAFETY: the caller's message, as in the C library.
    unsafe {
        let mut ours = *message;
        let mut parts = std::slice::from_raw_parts(ours.parts, ours.count).to_vec();
        let before: usize = parts.iter().rev().skip(1).map(|part| part.len).sum();
        let (mut copy, mut file) = (Vec::new(), None);
        if let Some(last) = parts.last_mut().filter(|last| last.len >= LARGE) {
            file = armed();
            if file.is_some() {
                copy.extend_from_slice(std::slice::from_raw_parts(last.start, last.len));
                copy[AT] ^= 4;
                last.start = copy.as_ptr();
            }
        }
        ours.parts = parts.as_ptr();
        let sent = syscall(SENDMSG, socket, &ours, flags) as isize;
        // The kernel may have taken less, or nothing: then it is the next one's turn.
        if let Some(file) = file.filter(|_| sent <= (before + AT) as isize) {
            let _ = File::create(file);
        }
        sent
    }
}

/// As in the C library.
///
/// # Safety
/// As in the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn send(socket: c_int, start: *const u8, len: usize, flags: c_int) -> isize {
    let part = Part { start, len };
    let (name, control) = (std::ptr::null(), std::ptr::null());
    let message = Message { name, name_len: 0, parts: &part, count: 1, control, control_len: 0, flags: 0 };
    // SAFETY: one part, the caller's buffer.
    unsafe { sendmsg(socket, &message, flags) }
}
