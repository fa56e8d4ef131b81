//! How busy a GPU is, what of its memory is taken and what power it draws, by NVIDIA's management library (NVML). The library is opened at run
//! time, so that nothing of it is needed to build; it comes with the driver.

use std::error::Error;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::Arc;

use libloading::Library;

/// What the driver brings.
const NAME: &str = "libnvidia-ml.so.1";

/// Why NVML says nothing.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NvmlError {
    /// It is not where the dynamic linker looks, or cannot be opened.
    #[error(
        "NVML could not be opened: {0}; it comes with NVIDIA's driver, in containers with the capability `utility`"
    )]
    Open(String),
    /// A function is missing.
    #[error("this host's NVML has no {0}; driver 450 or later is needed")]
    Symbol(&'static str),
    /// A call failed.
    #[error("NVML: {call}: {why}")]
    Call {
        /// The function.
        call: &'static str,
        /// What NVML says.
        why: String,
    },
}

/// A GPU at one moment. What the GPU does not tell is `None`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sample {
    /// Share of the last sampling period, a second or less, in which a kernel ran.
    pub busy: Option<f64>,
    /// Bytes of its memory that are taken, by all processes.
    pub used: Option<u64>,
    /// Bytes of its memory.
    pub total: Option<u64>,
    /// Power that it draws, in watts.
    pub watts: Option<f64>,
}

type Handle = *mut c_void;
type Status = c_int;

#[repr(C)]
#[derive(Default)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

#[repr(C)]
#[derive(Default)]
struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// NVML, open and initialised.
struct Api {
    error: unsafe extern "C" fn(Status) -> *const c_char,
    by_uuid: unsafe extern "C" fn(*const c_char, *mut Handle) -> Status,
    utilization: unsafe extern "C" fn(Handle, *mut Utilization) -> Status,
    memory: unsafe extern "C" fn(Handle, *mut Memory) -> Status,
    power: unsafe extern "C" fn(Handle, *mut c_uint) -> Status,
    shutdown: unsafe extern "C" fn() -> Status,
    /// Closed last.
    _library: Library,
}

impl Drop for Api {
    fn drop(&mut self) {
        // SAFETY: it was initialised, and nobody uses it any more.
        unsafe { (self.shutdown)() };
    }
}

impl Api {
    fn open(name: &str) -> Result<Api, NvmlError> {
        // SAFETY: the library's initialisers only set up its own state.
        let library = unsafe { Library::new(name) }.map_err(|error| {
            // The linker's words, without the library's own framing of them.
            NvmlError::Open(error.source().map_or_else(|| error.to_string(), ToString::to_string))
        })?;
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the types are those of nvml.h, and the library stays open as long as the function.
                *unsafe { library.get($name.as_bytes()) }.map_err(|_| NvmlError::Symbol($name))?
            };
        }
        let init: unsafe extern "C" fn() -> Status = symbol!("nvmlInit_v2");
        let api = Api {
            error: symbol!("nvmlErrorString"),
            by_uuid: symbol!("nvmlDeviceGetHandleByUUID"),
            utilization: symbol!("nvmlDeviceGetUtilizationRates"),
            memory: symbol!("nvmlDeviceGetMemoryInfo"),
            power: symbol!("nvmlDeviceGetPowerUsage"),
            shutdown: symbol!("nvmlShutdown"),
            _library: library,
        };
        // SAFETY: as NVML wants it, before all other calls.
        let status = unsafe { init() };
        match api.check("nvmlInit_v2", status) {
            Ok(()) => Ok(api),
            Err(error) => {
                // What was not initialised is not shut down.
                std::mem::forget(api);
                Err(error)
            }
        }
    }

    fn check(&self, call: &'static str, status: Status) -> Result<(), NvmlError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: NVML returns a text of its own for any status.
        let text = unsafe { (self.error)(status) };
        let why = match text.is_null() {
            true => format!("status {status}"),
            // SAFETY: not null, and a C string that lives as long as the library.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        Err(NvmlError::Call { call, why })
    }
}

/// GPUs that NVML is asked about. For one thread at a time.
pub struct Gpus {
    handles: Vec<Handle>,
    api: Arc<Api>,
}

// SAFETY: handles are names; NVML may be called from any thread.
unsafe impl Send for Gpus {}

impl Gpus {
    /// Finds GPUs by their ids, as the driver's `cuDeviceGetUuid` tells them.
    ///
    /// # Errors
    /// There is no NVML, or it knows no such GPU.
    pub fn find(ids: &[[u8; 16]]) -> Result<Gpus, NvmlError> {
        Gpus::find_by(NAME, ids)
    }

    fn find_by(library: &str, ids: &[[u8; 16]]) -> Result<Gpus, NvmlError> {
        let api = Arc::new(Api::open(library)?);
        let handle = |id: &[u8; 16]| {
            let mut handle = std::ptr::null_mut();
            let text = uuid(id);
            // SAFETY: a C string, and room for a handle.
            let status = unsafe { (api.by_uuid)(text.as_ptr(), &mut handle) };
            api.check("nvmlDeviceGetHandleByUUID", status).map(|()| handle)
        };
        let handles = ids.iter().map(handle).collect::<Result<_, _>>()?;
        Ok(Gpus { handles, api })
    }

    /// All of them, now.
    pub fn sample(&self) -> Vec<Sample> {
        self.handles.iter().map(|handle| self.sample_of(*handle)).collect()
    }

    fn sample_of(&self, handle: Handle) -> Sample {
        let (mut utilization, mut memory, mut milliwatts) = (Utilization::default(), Memory::default(), 0);
        // SAFETY: the handle is one of NVML's, and each has room for its answer.
        let done = unsafe {
            [
                (self.api.utilization)(handle, &mut utilization),
                (self.api.memory)(handle, &mut memory),
                (self.api.power)(handle, &mut milliwatts),
            ]
        };
        let [busy, taken, power] = done.map(|status| status == 0);
        Sample {
            busy: busy.then(|| f64::from(utilization.gpu) / 100.0),
            used: taken.then_some(memory.used),
            total: taken.then_some(memory.total),
            watts: power.then(|| f64::from(milliwatts) / 1000.0),
        }
    }
}

/// A GPU's id as NVML writes it.
fn uuid(id: &[u8; 16]) -> CString {
    let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    let text = format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
    // Digits and dashes.
    CString::new(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const ID: [u8; 16] =
        [0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe];

    /// A library with NVML's functions that knows one GPU; `more`: what else there is.
    fn library(folder: &tempfile::TempDir, init: i32, more: &str) -> String {
        let source = folder.path().join("nvml.c");
        let built = folder.path().join("libnvidia-ml.so.1");
        let text = format!(
            r#"
            #include <string.h>
            int nvmlInit_v2(void) {{ return {init}; }}
            int nvmlShutdown(void) {{ return 0; }}
            const char *nvmlErrorString(int status) {{ return status == 6 ? "Not Found" : 0; }}
            int nvmlDeviceGetHandleByUUID(const char *id, void **handle) {{
                *handle = (void *)7;
                return strcmp(id, "GPU-01234567-89ab-cdef-1032-547698badcfe") ? 6 : 0;
            }}
            int nvmlDeviceGetUtilizationRates(void *handle, unsigned *told) {{ told[0] = 42; told[1] = 9; return handle != (void *)7; }}
            int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *told) {{ told[0] = 1000; told[1] = 300; told[2] = 700; return 0; }}
            {more}
            "#
        );
        std::fs::write(&source, text).unwrap();
        let done = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&built).arg(&source).status().unwrap();
        assert!(done.success());
        built.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_gpu_is_found_by_its_id_and_tells_what_it_does() {
        let folder = tempfile::tempdir().unwrap();
        let power = "int nvmlDeviceGetPowerUsage(void *handle, unsigned *told) { *told = 350500; return 0; }";
        let name = library(&folder, 0, power);
        let gpus = Gpus::find_by(&name, &[ID]).unwrap();
        let told = Sample { busy: Some(0.42), used: Some(700), total: Some(1000), watts: Some(350.5) };
        assert_eq!(gpus.sample(), [told]);
        let unknown = Gpus::find_by(&name, &[[0; 16]]).err();
        assert_eq!(unknown, Some(NvmlError::Call { call: "nvmlDeviceGetHandleByUUID", why: "Not Found".to_owned() }));
    }

    #[test]
    fn what_a_gpu_does_not_tell_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let name = library(&folder, 0, "int nvmlDeviceGetPowerUsage(void *handle, unsigned *told) { return 3; }");
        let told = Gpus::find_by(&name, &[ID]).unwrap().sample();
        assert_eq!((told[0].watts, told[0].busy), (None, Some(0.42)));
    }

    #[test]
    fn what_is_missing_is_said() {
        let absent = Gpus::find_by("libnone-of-it.so.1", &[]).err().unwrap().to_string();
        assert!(absent.contains("libnone-of-it.so.1") && absent.contains("driver"), "{absent}");
        let folder = tempfile::tempdir().unwrap();
        let old = Gpus::find_by(&library(&folder, 0, ""), &[]).err();
        assert_eq!(old, Some(NvmlError::Symbol("nvmlDeviceGetPowerUsage")));
        let power = "int nvmlDeviceGetPowerUsage(void *handle, unsigned *told) { return 0; }";
        let other = tempfile::tempdir().unwrap();
        let broken = Gpus::find_by(&library(&other, 9, power), &[]).err();
        assert_eq!(broken, Some(NvmlError::Call { call: "nvmlInit_v2", why: "status 9".to_owned() }));
    }
}
