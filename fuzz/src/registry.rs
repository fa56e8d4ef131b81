//! Decodes and checks the records of members, which arrive over gRPC at a router's registry or as JSON from etcd.

use baton_cluster::{Member, Role, member_from_proto, member_to_proto};
use baton_proto::v1;
use baton_types::WorkerId;
use prost::Message;

use crate::signature;

pub(crate) fn registry(input: &[u8]) -> u64 {
    let Some((which, bytes)) = input.split_first() else { return 0 };
    match which % 3 {
        0 => {
            let request = v1::RegisterRequest::decode(bytes).map_err(|_| "no message");
            signature(&request.map(|request| request.member.map(checked)))
        }
        1 => {
            let view = v1::View::decode(bytes).map_err(|_| "no message");
            signature(&view.map(|view| view.members.into_iter().map(checked).collect::<Vec<_>>()))
        }
        _ => {
            let member = serde_json::from_slice::<Member>(bytes).map_err(|error| error.classify());
            signature(&member.map(|member| {
                let again = serde_json::to_vec(&member).map(|json| serde_json::from_slice::<Member>(&json).ok());
                assert_eq!(again.ok().flatten().as_ref(), Some(&member));
                member.validate().map_err(|error| error.to_string())
            }))
        }
    }
}

/// An accepted member must be valid, and must survive conversion to protobuf and back.
fn checked(member: v1::Member) -> Result<Role, String> {
    let member = member_from_proto(member).map_err(|error| error.to_string())?;
    assert_eq!(member.validate(), Ok(()));
    assert_eq!(member_from_proto(member_to_proto(member.clone())).as_ref(), Ok(&member));
    Ok(member.role)
}

pub(crate) fn registry_seeds() -> Vec<Vec<u8>> {
    let member = |id, role| Member {
        id: WorkerId(id),
        role,
        grpc: "http://127.0.0.1:8001".into(),
        admin: "http://[::1]:9000".into(),
        model: "smollm2".into(),
        layout: 42,
        blocks: 8,
        block_size: 16,
        window_tokens: 0,
        max_running: 0,
        context_tokens: 128,
        draining: false,
        late_targets: true,
        exchanges: 9,
        kv_secret: 0,
    };
    let (one, other) = (member(1, Role::Prefill), member(2, Role::Supervisor));
    let register = v1::RegisterRequest { member: Some(member_to_proto(one.clone())), ttl_ms: 5_000 };
    let view =
        v1::View { revision: 3, members: vec![member_to_proto(one.clone()), member_to_proto(other)], left: vec![7] };
    let json = serde_json::to_vec(&one).unwrap_or_default();
    let tagged = |tag: u8, bytes: Vec<u8>| [vec![tag], bytes].concat();
    vec![tagged(0, register.encode_to_vec()), tagged(1, view.encode_to_vec()), tagged(2, json)]
}
