//! A pool as UCX knows it: one context, with the whole pool registered once for all sessions of this end, in host memory or a GPU's.

use std::ffi::{CStr, CString};
use std::ptr::{self, NonNull};

use baton_ucx_sys::{
    self as sys, ATTR_FIELD_MEMORY_TYPES, Api, ContextAttr, FEATURE_RMA, FEATURE_WAKEUP, MEM_MAP_PARAM_FIELD_ADDRESS,
    MEM_MAP_PARAM_FIELD_LENGTH, MEM_MAP_PARAM_FIELD_MEMORY_TYPE, MEMORY_TYPE_CUDA, MEMORY_TYPE_HOST, MemMapParams,
    PARAM_FIELD_FEATURES, PARAM_FIELD_MT_WORKERS_SHARED, Params, Status,
};

use crate::device::{MemoryKind, Pool, Registrable};
use crate::options::UcxSettings;
use baton_handoff::TransferError;

/// A UCX context, and the pool registered with it.
pub(crate) struct UcxEngine {
    context: Context,
    /// The registration. Ends before the context and the pool are dropped.
    memory: NonNull<sys::Memory>,
    base: u64,
    pool: Pool,
}

// SAFETY: the context was made to be shared between workers of several threads (MT_WORKERS_SHARED), and the registration
// is only read until the last owner drops it.
unsafe impl Send for UcxEngine {}
// SAFETY: as above.
unsafe impl Sync for UcxEngine {}

impl UcxEngine {
    /// Opens the library and registers `pool`.
    pub(crate) fn open(settings: &UcxSettings, pool: Pool) -> Result<UcxEngine, TransferError> {
        let context = Context::new(settings)?;
        let Registrable { address, kind } = pool.registrable()?;
        if kind == MemoryKind::Cuda && context.memory_types()? & 1 << MEMORY_TYPE_CUDA == 0 {
            let cause = "it is in a GPU's memory, and this UCX has no CUDA support, or has not found a driver";
            return Err(TransferError::ucx("register the pool", cause));
        }
        let mut params = MemMapParams::new();
        params.field_mask = MEM_MAP_PARAM_FIELD_ADDRESS | MEM_MAP_PARAM_FIELD_LENGTH | MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
        (params.address, params.length) = (ptr::with_exposed_provenance_mut(address as usize), pool.bytes());
        params.memory_type = match kind {
            MemoryKind::Host => MEMORY_TYPE_HOST,
            MemoryKind::Cuda => MEMORY_TYPE_CUDA,
        };
        let mut memory = ptr::null_mut();
        // SAFETY: the pool's memory is there for as long as `pool`, which goes after the registration.
        let status = unsafe { (context.api.mem_map)(context.handle.as_ptr(), &params, &mut memory) };
        let memory = made(context.api, "register the pool", status, memory)?;
        Ok(UcxEngine { context, memory, base: address, pool })
    }

    pub(crate) fn api(&self) -> &'static Api {
        self.context.api
    }

    pub(super) fn context(&self) -> *mut sys::Context {
        self.context.handle.as_ptr()
    }

    pub(super) fn memory(&self) -> *mut sys::Memory {
        self.memory.as_ptr()
    }

    /// The registered pool.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Address of the pool's first byte, in host or GPU memory.
    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    /// Address of `len` bytes at `offset` of the pool, for UCX, or None when they lie outside.
    pub(super) fn at(&self, offset: usize, len: usize) -> Option<*const u8> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.pool.bytes());
        inside.then(|| ptr::with_exposed_provenance(self.base as usize + offset))
    }

    /// The opaque key by which a peer writes to the pool.
    pub(crate) fn pack_key(&self) -> Result<Vec<u8>, TransferError> {
        let (mut buffer, mut size) = (ptr::null_mut(), 0);
        // SAFETY: handles of this engine and places for the answer.
        let status = unsafe { (self.api().rkey_pack)(self.context(), self.memory(), &mut buffer, &mut size) };
        let buffer = made(self.api(), "describe the pool to others", status, buffer)?;
        // SAFETY: UCX wrote `size` bytes there, which are copied before they are released.
        let key = unsafe { std::slice::from_raw_parts(buffer.as_ptr().cast::<u8>(), size) }.to_vec();
        // SAFETY: the buffer was made by `rkey_pack` just above.
        unsafe { (self.api().rkey_buffer_release)(buffer.as_ptr()) };
        Ok(key)
    }
}

impl Drop for UcxEngine {
    fn drop(&mut self) {
        // SAFETY: workers hold an `Arc` of this engine, so nobody uses the registration any more.
        let status = unsafe { (self.api().mem_unmap)(self.context(), self.memory()) };
        if let Err(status) = status.ok() {
            tracing::warn!(cause = words(self.api(), status), "the pool stays registered with UCX");
        }
    }
}

/// A context without memory or workers.
struct Context {
    api: &'static Api,
    handle: NonNull<sys::Context>,
}

impl Context {
    fn new(settings: &UcxSettings) -> Result<Context, TransferError> {
        let loaded = sys::load(settings.directory.as_deref());
        let (api, version) = loaded.map_err(|e| TransferError::ucx("open the library", e))?;
        let config = UcpConfig::new(api, settings)?;
        let mut params = Params::new();
        params.field_mask = PARAM_FIELD_FEATURES | PARAM_FIELD_MT_WORKERS_SHARED;
        params.features = FEATURE_RMA | FEATURE_WAKEUP;
        params.mt_workers_shared = 1;
        let mut handle = ptr::null_mut();
        let (major, minor) = (sys::LEAST.major, sys::LEAST.minor);
        // SAFETY: structures as the headers have them, and a place for the answer.
        let status = unsafe { (api.init_version)(major, minor, &params, config.handle.as_ptr(), &mut handle) };
        let handle = made(api, "start", status, handle)?;
        tracing::debug!(%version, "UCX context made");
        Ok(Context { api, handle })
    }

    /// Kinds of memory it moves, as a bit mask.
    fn memory_types(&self) -> Result<u64, TransferError> {
        let mut attr = ContextAttr::new();
        attr.field_mask = ATTR_FIELD_MEMORY_TYPES;
        // SAFETY: a live context, a structure as the header has it.
        let status = unsafe { (self.api.context_query)(self.handle.as_ptr(), &mut attr) };
        status.ok().map_err(|status| TransferError::ucx("say what memory it moves", words(self.api, status)))?;
        Ok(attr.memory_types)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the registration is gone, and so are all workers.
        unsafe { (self.api.cleanup)(self.handle.as_ptr()) };
    }
}

/// Bytes of a message of UCX's TCP transport. Endpoints that report a peer's failure put over TCP by messages, which the target copies.
/// UCX's default of 8 KiB makes that a quarter as fast. A session has buffers for 8 messages in each direction.
const TCP_SEGMENT: &str = "128k";

/// Settings for a context. Later ones override earlier ones: UCX's own files and variables, then this crate's, then the operator's.
struct UcpConfig {
    api: &'static Api,
    handle: NonNull<sys::Config>,
}

impl UcpConfig {
    fn new(api: &'static Api, settings: &UcxSettings) -> Result<UcpConfig, TransferError> {
        let mut handle = ptr::null_mut();
        // SAFETY: null stands for UCX's default prefix and files.
        let status = unsafe { (api.config_read)(ptr::null(), ptr::null(), &mut handle) };
        let config = UcpConfig { api, handle: made(api, "read its settings", status, handle)? };
        for name in ["TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE"] {
            config.set(name, TCP_SEGMENT)?;
        }
        for (name, value) in &settings.options.0 {
            config.set(name, value)?;
        }
        Ok(config)
    }

    fn set(&self, name: &str, value: &str) -> Result<(), TransferError> {
        let bad = |cause: &str| TransferError::argument("ucx options", format!("{name}={value}: {cause}"));
        // Users may write a name as UCX's environment variable, with the prefix UCX_.
        let bare = name.strip_prefix("UCX_").unwrap_or(name);
        let (Ok(bare), Ok(text)) = (CString::new(bare), CString::new(value)) else {
            return Err(bad("a zero byte"));
        };
        // SAFETY: a live config and two strings that end with a zero byte.
        let status = unsafe { (self.api.config_modify)(self.handle.as_ptr(), bare.as_ptr(), text.as_ptr()) };
        status.ok().map_err(|status| bad(words(self.api, status)))
    }
}

impl Drop for UcpConfig {
    fn drop(&mut self) {
        // SAFETY: made by `config_read`, used by nobody any more.
        unsafe { (self.api.config_release)(self.handle.as_ptr()) };
    }
}

/// Checks that UCX has made a handle, and returns it.
pub(super) fn made<T>(
    api: &'static Api,
    what: &'static str,
    status: Status,
    handle: *mut T,
) -> Result<NonNull<T>, TransferError> {
    status.ok().map_err(|status| TransferError::ucx(what, words(api, status)))?;
    NonNull::new(handle).ok_or_else(|| TransferError::ucx(what, "it answered nothing"))
}

/// UCX's text for a status.
pub(super) fn words(api: &'static Api, status: Status) -> &'static str {
    // SAFETY: takes any status and returns a constant, or text of a thread's own that is the same for each status.
    let text = unsafe { (api.status_string)(status) };
    if text.is_null() {
        return "an unknown status";
    }
    // SAFETY: a string that ends with a zero byte and is never freed.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("a status that is not text")
}
