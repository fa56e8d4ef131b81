use std::collections::BTreeSet;

use super::*;

/// What the fake is for: any wrong byte that attention sees changes the answer, and no other byte does.
#[test]
fn every_visible_byte_and_no_other_changes_the_answer() {
    let geometry = PoolGeometry::uniform(tiny_layout(4), 6);
    let mut pools = KvPools::new(&geometry, CacheConfig::default()).unwrap();
    let gap = pools.allocate(5).unwrap();
    let tables = pools.allocate(10).unwrap();
    pools.free(gap).unwrap();
    let (prompt, params) = ([5, 6, 7, 8, 9, 1, 2, 3, 4, 11], SamplingParams::default());
    let row = |start: usize, end: usize, sample| Row {
        seq: SeqId(1),
        tokens: &prompt[start..end],
        follows: None,
        start: start as u32,
        tables: tables.as_slice(),
        score: None,
        sample,
    };
    let sample = Some(Sample { params: &params, index: 0, prompt: &prompt, generated: &[] });
    let mut model = FakeModel::new(geometry.clone(), u32::MAX);
    let run = |model: &mut FakeModel, row| {
        let mut out = Vec::new();
        let batch = Batch { rows: &[row], copies: &[] };
        model.run(&batch, &mut |_| {}, &mut out).unwrap();
        out.pop()
    };
    assert_eq!(run(&mut model, row(0, 9, None)), None);
    let clean = model.memory().clone();
    let wanted = run(&mut model, row(9, 10, sample));
    let mut visible = BTreeSet::new();
    for layer in 0..3 {
        // The last of 10 tokens sees the 5 latest in the layer with a window.
        for position in if layer == 1 { 5..9 } else { 0..9 } {
            for offset in model.pieces(layer, &RowPlace::of(&row(0, 9, None)), position).unwrap() {
                visible.extend(offset..offset + model.piece_bytes(layer));
            }
        }
    }
    for at in 0..clean.len() {
        model.memory_mut().copy_from_slice(&clean);
        model.memory_mut()[at] ^= 1;
        assert_eq!(run(&mut model, row(9, 10, sample)) != wanted, visible.contains(&at), "byte {at}");
    }
}

#[test]
fn the_seed_matters_unless_greedy() {
    let layout = tiny_layout(4);
    let ids = |params: &SamplingParams| -> Vec<u32> {
        answer(&layout, 10_000, &[1, 2, 3], params).unwrap().iter().map(|token| token.id).collect()
    };
    let [one, two] = [1, 2].map(|seed| SamplingParams { seed, ..SamplingParams::default() });
    assert_eq!(ids(&one), ids(&one));
    assert_ne!(ids(&one), ids(&two));
    let [one, two] = [one, two].map(|params| SamplingParams { temperature: 0.0, ..params });
    assert_eq!(ids(&one), ids(&two));
}
