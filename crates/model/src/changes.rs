//! Computes penalties and logit bias as one list of changes, used by every sampler. Pure.

use baton_engine::Sample;
use baton_kernels::LogitChange;

/// Writes to `out`, in place of its contents, the changes to a row's logits before a token is chosen: sorted by token id, each id once,
/// all ids below `vocab`. Each change applies, in this order:
///
/// - the repetition penalty, for tokens of prompt and answer;
/// - presence and frequency penalties, for tokens of the answer;
/// - the bias, and minus infinity for stop tokens where the answer must go on.
///
/// `seen` is scratch memory for sorting.
pub(crate) fn changes(sample: &Sample<'_>, vocab: usize, seen: &mut Vec<u32>, out: &mut Vec<LogitChange>) {
    let p = sample.params;
    out.clear();
    if p.repetition_penalty != 1.0 {
        sorted(seen, sample.prompt.iter().chain(sample.generated));
        seen.dedup();
        out.extend(seen.iter().map(|&id| LogitChange { divide: p.repetition_penalty, ..LogitChange::none(id) }));
    }
    if p.presence_penalty != 0.0 || p.frequency_penalty != 0.0 {
        sorted(seen, sample.generated.iter());
        out.extend(seen.chunk_by(|a, b| a == b).map(|run| LogitChange {
            subtract: p.presence_penalty + p.frequency_penalty * run.len() as f32,
            ..LogitChange::none(run[0])
        }));
    }
    out.extend(p.logit_bias.iter().map(|&(id, add)| LogitChange { add, ..LogitChange::none(id) }));
    if p.goes_on(sample.index) {
        let never = |&id: &u32| LogitChange { add: f32::NEG_INFINITY, ..LogitChange::none(id) };
        out.extend(p.stop_token_ids.iter().map(never));
    }
    out.retain(|change| (change.id as usize) < vocab);
    // Each kind of change leaves the other kinds' factors at 1 and terms at 0, so a product and two sums merge changes of the same token.
    out.sort_unstable_by_key(|change| change.id);
    out.dedup_by(|more, first| {
        let same = more.id == first.id;
        if same {
            first.divide *= more.divide;
            first.subtract += more.subtract;
            first.add += more.add;
        }
        same
    });
}

fn sorted<'a>(seen: &mut Vec<u32>, tokens: impl Iterator<Item = &'a u32>) {
    seen.clear();
    seen.extend(tokens);
    seen.sort_unstable();
}

#[cfg(test)]
mod tests {
    use baton_types::SamplingParams;

    use super::*;

    #[test]
    fn each_logit_is_changed_once_by_all_that_change_it() {
        let params = SamplingParams {
            repetition_penalty: 2.0,
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            logit_bias: vec![(3, 1.0), (9, 4.0), (10, 1.0)],
            ..SamplingParams::default()
        };
        let sample = Sample { params: &params, index: 3, prompt: &[7, 1], generated: &[3, 1, 3] };
        let (mut seen, mut out) = (Vec::new(), vec![LogitChange::none(0)]);
        changes(&sample, 10, &mut seen, &mut out);
        let change = |id, divide, subtract, add| LogitChange { id, divide, subtract, add };
        let want =
            [change(1, 2.0, 0.75, 0.0), change(3, 2.0, 1.0, 1.0), change(7, 2.0, 0.0, 0.0), change(9, 1.0, 0.0, 4.0)];
        assert_eq!(out, want);
        assert_eq!((want[1].of(8.0), want[1].of(-8.0)), (4.0, -16.0));
        changes(&Sample { params: &SamplingParams::default(), ..sample }, 10, &mut seen, &mut out);
        assert_eq!(out, []);
    }
}
