//! Which host this process runs on, as the system says.

use std::fs;
use std::os::unix::fs::MetadataExt;

use baton_handoff::Host;

/// The host of this process.
pub(crate) fn this_host() -> Host {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().and_then(|text| parse_uuid(&text));
    let netns = fs::metadata("/proc/self/ns/net").ok().map(|m| m.ino());
    match (boot, netns) {
        (Some(boot), Some(netns)) => Host { boot, netns },
        _ => Host::UNKNOWN,
    }
}

fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
    if digits.len() != 32 {
        return None;
    }
    u128::from_str_radix(&digits, 16).ok().map(u128::to_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_on_its_own_host() {
        assert!(this_host().same_as(&this_host()));
        let boot = parse_uuid("00112233-4455-6677-8899-aabbccddeeff\n").unwrap();
        assert_eq!(boot[..4], [0x00, 0x11, 0x22, 0x33]);
        assert_eq!(parse_uuid("zz"), None);
    }
}
