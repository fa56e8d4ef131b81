//! Checks every structure, offset and constant against UCX's headers, by a C program made from the same list.

use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::Command;

use baton_ucx_sys::*;

/// Pairs of a C expression and its value here.
type Facts = Vec<(String, u64)>;

macro_rules! fields {
    ($facts:ident, $c:literal => $rust:ident { $($field:ident),* $(,)? }) => {
        $facts.push((format!("sizeof({})", $c), size_of::<$rust>() as u64));
        $($facts.push((format!("offsetof({}, {})", $c, stringify!($field)), offset_of!($rust, $field) as u64));)*
    };
}

macro_rules! constants {
    ($facts:ident, $($rust:ident),* $(,)?) => {
        $($facts.push((format!("UCP_{}", stringify!($rust)), u64::from($rust)));)*
    };
}

fn facts() -> Facts {
    let mut facts = Facts::new();
    fields!(facts, "ucp_params_t" => Params {
        field_mask, features, request_size, request_init, request_cleanup, tag_sender_mask, mt_workers_shared,
        estimated_num_eps, estimated_num_ppn, name, node_local_id,
    });
    fields!(facts, "ucp_worker_params_t" => WorkerParams {
        field_mask, thread_mode, cpu_mask, events, user_data, event_fd, flags, name, am_alignment, client_id,
    });
    fields!(facts, "ucp_err_handler_t" => ErrorHandler { cb, arg });
    fields!(facts, "ucs_sock_addr_t" => SocketAddress { addr, addrlen });
    fields!(facts, "ucp_ep_params_t" => EndpointParams {
        field_mask, address, err_mode, err_handler, user_data, flags, sockaddr, conn_request, name, local_sockaddr,
    });
    fields!(facts, "ucp_mem_map_params_t" => MemMapParams {
        field_mask, address, length, flags, prot, memory_type, exported_memh_buffer,
    });
    fields!(facts, "ucp_request_param_t" => RequestParam {
        op_attr_mask, flags, request, cb, datatype, user_data, reply_buffer, memory_type, recv_info, memh,
        remote_datatype, remote, remote_count,
    });
    fields!(facts, "ucp_transport_entry_t" => TransportEntry { transport_name, device_name });
    fields!(facts, "ucp_transports_t" => Transports { entries, num_entries, entry_size });
    fields!(facts, "struct sockaddr_storage" => SocketStorage {});
    fields!(facts, "ucp_ep_attr_t" => EndpointAttr {
        field_mask, name, local_sockaddr, remote_sockaddr, transports, user_data,
    });
    fields!(facts, "ucs_status_t" => Status {});
    fields!(facts, "ucs_status_ptr_t" => StatusPtr {});
    constants!(
        facts,
        PARAM_FIELD_FEATURES,
        PARAM_FIELD_MT_WORKERS_SHARED,
        FEATURE_RMA,
        FEATURE_WAKEUP,
        WORKER_PARAM_FIELD_THREAD_MODE,
        EP_PARAM_FIELD_REMOTE_ADDRESS,
        EP_PARAM_FIELD_ERR_HANDLING_MODE,
        EP_PARAM_FIELD_ERR_HANDLER,
        ERR_HANDLING_MODE_PEER,
        MEM_MAP_PARAM_FIELD_ADDRESS,
        MEM_MAP_PARAM_FIELD_LENGTH,
        MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        ATTR_FIELD_MEMORY_TYPES,
        OP_ATTR_FIELD_FLAGS,
        OP_ATTR_FIELD_MEMH,
        EP_CLOSE_FLAG_FORCE,
        EP_ATTR_FIELD_TRANSPORTS,
    );
    // Later versions append fields, so its size is not compared.
    for (field, offset) in [
        ("memory_types", offset_of!(ContextAttr, memory_types)),
        ("thread_mode", offset_of!(ContextAttr, thread_mode)),
        ("name", offset_of!(ContextAttr, name)),
    ] {
        facts.push((format!("offsetof(ucp_context_attr_t, {field})"), offset as u64));
    }
    facts.push(("sizeof(((ucp_context_attr_t*)0)->name)".into(), 32));
    facts.push(("UCS_MEMORY_TYPE_HOST".into(), MEMORY_TYPE_HOST.into()));
    facts.push(("UCS_MEMORY_TYPE_CUDA".into(), MEMORY_TYPE_CUDA.into()));
    facts.push(("UCS_THREAD_MODE_SERIALIZED".into(), THREAD_MODE_SERIALIZED.into()));
    for (name, status) in [
        ("UCS_OK", Status::OK),
        ("UCS_INPROGRESS", Status::IN_PROGRESS),
        ("UCS_ERR_BUSY", Status::BUSY),
        ("UCS_ERR_CANCELED", Status::CANCELED),
    ] {
        facts.push((name.into(), i64::from(status.0) as u64));
    }
    facts
}

/// The values that the headers give, or why they are not available here.
fn in_c(facts: &Facts) -> Result<Vec<u64>, String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/fetch-ucx");
    let found = Command::new(script).output().map_err(|e| e.to_string())?;
    if !found.status.success() {
        return Err(String::from_utf8_lossy(&found.stderr).into_owned());
    }
    let headers = Path::new(String::from_utf8_lossy(&found.stdout).trim()).join("include");
    let mut source = String::from("#include <stddef.h>\n#include <stdio.h>\n#include <ucp/api/ucp.h>\nint main() {\n");
    for (expression, _) in facts {
        writeln!(source, "    printf(\"%llu\\n\", (unsigned long long)({expression}));").map_err(|e| e.to_string())?;
    }
    source += "}\n";
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (file, program) = (folder.join("layout.c"), folder.join("layout"));
    std::fs::write(&file, source).map_err(|e| e.to_string())?;
    let compiled = Command::new("cc").arg("-I").arg(headers).arg("-o").arg(&program).arg(&file).output();
    let compiled = compiled.map_err(|e| format!("cc: {e}"))?;
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(program).output().map_err(|e| e.to_string())?;
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|line| line.parse().map_err(|e| format!("{line}: {e}")))
        .collect()
}

#[test]
fn declarations_are_those_of_the_headers() {
    let facts = facts();
    let values = match in_c(&facts) {
        Ok(values) => values,
        Err(reason) => {
            let all = std::env::var_os("BATON_REQUIRE_ALL").is_some_and(|value| !value.is_empty());
            assert!(!all, "BATON_REQUIRE_ALL is set, and there are no headers or no compiler: {reason}");
            return println!("skipped: no headers or no compiler: {reason}");
        }
    };
    assert_eq!(values.len(), facts.len());
    for ((expression, here), there) in facts.iter().zip(values) {
        assert_eq!(*here, there, "{expression}");
    }
}
