//! Converts members to and from messages of `proto/baton/v1/cluster.proto`. Incoming members are checked.

use baton_membership::{Member, MembershipError, Role};
use baton_proto::v1;
use baton_types::WorkerId;

/// A member as a message.
pub fn member_to_proto(m: Member) -> v1::Member {
    let role = match m.role {
        Role::Prefill => v1::Role::Prefill,
        Role::Decode => v1::Role::Decode,
        Role::Supervisor => v1::Role::Supervisor,
        Role::KvStore => v1::Role::KvStore,
    };
    v1::Member {
        id: m.id.0,
        role: role.into(),
        grpc: m.grpc,
        admin: m.admin,
        model: m.model,
        layout: m.layout,
        blocks: m.blocks,
        block_size: m.block_size,
        window_tokens: m.window_tokens,
        max_running: m.max_running,
        context_tokens: m.context_tokens,
        draining: m.draining,
        late_targets: m.late_targets,
        exchanges: m.exchanges,
        kv_secret: m.kv_secret,
    }
}

/// The member in a message.
///
/// # Errors
/// A field has a value that no registry takes (I8).
pub fn member_from_proto(m: v1::Member) -> Result<Member, MembershipError> {
    let role = match v1::Role::try_from(m.role) {
        Ok(v1::Role::Prefill) => Role::Prefill,
        Ok(v1::Role::Decode) => Role::Decode,
        Ok(v1::Role::Supervisor) => Role::Supervisor,
        Ok(v1::Role::KvStore) => Role::KvStore,
        Ok(v1::Role::Unspecified) | Err(_) => {
            let problem = format!("is {}; it must be prefill (1), decode (2), supervisor (3) or kv-store (4)", m.role);
            return Err(MembershipError::Member { field: "role", problem });
        }
    };
    let member = Member {
        id: WorkerId(m.id),
        role,
        grpc: m.grpc,
        admin: m.admin,
        model: m.model,
        layout: m.layout,
        blocks: m.blocks,
        block_size: m.block_size,
        window_tokens: m.window_tokens,
        max_running: m.max_running,
        context_tokens: m.context_tokens,
        draining: m.draining,
        late_targets: m.late_targets,
        exchanges: m.exchanges,
        kv_secret: m.kv_secret,
    };
    member.validate()?;
    Ok(member)
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_membership::testing::member;
    use baton_membership::{MAX_MEMBERS, MAX_TEXT, MAX_VIEW};
    use prost::Message as _;

    #[test]
    fn members_survive_the_wire() {
        for role in [Role::Prefill, Role::Decode, Role::Supervisor, Role::KvStore] {
            let original =
                Member { role, draining: true, late_targets: true, exchanges: 5, kv_secret: 7, ..member(u64::MAX) };
            assert_eq!(member_from_proto(member_to_proto(original.clone())), Ok(original));
        }
        let unknown = v1::Member { role: 9, ..member_to_proto(member(1)) };
        assert!(member_from_proto(unknown).unwrap_err().to_string().contains("member.role: is 9"));
    }

    #[test]
    fn the_largest_view_fits_one_message() {
        let text = "x".repeat(MAX_TEXT);
        let largest = v1::Member {
            grpc: text.clone(),
            admin: text.clone(),
            model: text,
            blocks: u32::MAX,
            block_size: u32::MAX,
            window_tokens: u32::MAX,
            max_running: u32::MAX,
            context_tokens: u32::MAX,
            draining: true,
            late_targets: true,
            exchanges: 3,
            kv_secret: 4,
            ..member_to_proto(member(u64::MAX))
        };
        let view =
            v1::View { revision: u64::MAX, members: vec![largest; MAX_MEMBERS], left: vec![u64::MAX; MAX_MEMBERS] };
        assert!(view.encoded_len() < MAX_VIEW, "{}", view.encoded_len());
    }
}
