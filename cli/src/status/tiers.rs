//! The output of `baton status --kv`: what each tier of each worker's KV holds. Pure.

use baton_proto::v1;
use serde_json::{Value, json};

use super::report::Answered;
use crate::units::bytes;

/// A line for each tier of each worker.
pub fn table(workers: &[Answered]) -> String {
    let mut text = format!(
        "{:<9} {:<19} {:<6} {:>9} {:>10} {:>10} {:>12} {:>6} {:>8} {:>10}\n",
        "ROLE", "ID", "TIER", "BLOCKS", "BYTES", "LIMIT", "HIT TOKENS", "SHARE", "DAMAGED", "WRITTEN"
    );
    for worker in workers {
        let head = format!("{:<9} {:<19}", worker.role.as_str(), worker.id.to_string());
        match &worker.answer {
            Err(error) => text += &format!("{head} unreachable: {error:#}\n"),
            Ok(status) if status.tiers.is_empty() => {
                text += &format!("{head} says nothing of its tiers: it is of an older version\n")
            }
            Ok(status) => status.tiers.iter().for_each(|tier| text += &line(&head, tier, &status.tiers)),
        }
    }
    text
}

fn line(head: &str, tier: &v1::KvTier, all: &[v1::KvTier]) -> String {
    let dash = || "-".to_owned();
    let hits = tier.hit_tokens.map_or_else(dash, |tokens| tokens.to_string());
    let share = share(tier, all).map_or_else(dash, |share| format!("{:.0} %", share * 100.0));
    let [held, limit, written] = [tier.bytes, tier.limit_bytes, tier.written_bytes].map(bytes);
    let written = if ["disk", "object"].contains(&tier.tier.as_str()) { written } else { dash() };
    format!(
        "{head} {:<6} {:>9} {held:>10} {limit:>10} {hits:>12} {share:>6} {:>8} {written:>10}\n",
        tier.tier, tier.blocks, tier.verify_failures
    )
}

/// The share of a tier in the tokens that the worker's store has handed out.
fn share(tier: &v1::KvTier, all: &[v1::KvTier]) -> Option<f64> {
    let sum: u64 = all.iter().filter_map(|tier| tier.hit_tokens).sum();
    tier.hit_tokens.filter(|_| sum > 0).map(|tokens| tokens as f64 / sum as f64)
}

/// The tiers of a worker as JSON.
pub fn json(tiers: &[v1::KvTier]) -> Value {
    let one = |tier: &v1::KvTier| {
        json!({
            "tier": tier.tier,
            "blocks": tier.blocks,
            "bytes": tier.bytes,
            "limit_bytes": tier.limit_bytes,
            "hit_tokens": tier.hit_tokens,
            "hit_share": share(tier, tiers),
            "verify_failures": tier.verify_failures,
            "written_bytes": tier.written_bytes,
        })
    };
    tiers.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use baton_cluster::Role;
    use baton_types::WorkerId;

    use super::*;

    fn tier(name: &str, hit_tokens: Option<u64>) -> v1::KvTier {
        v1::KvTier {
            tier: name.into(),
            blocks: 3,
            bytes: 3 << 20,
            limit_bytes: 1 << 30,
            hit_tokens,
            ..Default::default()
        }
    }

    #[test]
    fn each_tier_has_a_line_and_older_workers_say_nothing() {
        let asked = |tiers| Answered {
            role: Role::Decode,
            id: WorkerId(1),
            at: String::new(),
            admin: String::new(),
            model: String::new(),
            answer: Ok(v1::StatusResponse { tiers, ..Default::default() }),
        };
        let tiers = vec![tier("pool", None), tier("host", Some(30)), tier("disk", Some(10)), tier("object", Some(0))];
        let text = table(&[asked(tiers.clone()), asked(Vec::new())]);
        let words =
            |line: usize| text.lines().nth(line).unwrap().split_whitespace().skip(2).collect::<Vec<_>>().join(" ");
        assert_eq!(words(1), "pool 3 3.0 MiB 1.0 GiB - - 0 -");
        assert_eq!(words(2), "host 3 3.0 MiB 1.0 GiB 30 75 % 0 -");
        assert_eq!(words(3), "disk 3 3.0 MiB 1.0 GiB 10 25 % 0 0 B");
        assert_eq!(words(4), "object 3 3.0 MiB 1.0 GiB 0 0 % 0 0 B");
        assert!(words(5).contains("older version"));
        assert_eq!(json(&tiers)[1]["hit_share"], 0.75);
    }
}
