use super::*;
use crate::fake::{FakeModel, KvMemory, tiny_layout};
use crate::{Batch, RunError};

fn setup(block_size: u32) -> Setup {
    let mut setup =
        Setup { geometry: PoolGeometry::uniform(tiny_layout(block_size), 1), vocab: 1000, answer_tokens: 5 };
    setup.geometry.blocks = vec![setup.blocks(), setup.blocks()];
    setup
}

type Fault = fn(&mut FakeModel, &Batch<'_>, &mut dyn FnMut(u32), &mut Vec<TokenOut>) -> Result<(), RunError>;

/// A runner with one planted fault.
struct Faulty {
    inner: FakeModel,
    fault: Fault,
    out: Vec<TokenOut>,
}

impl ModelRunner for Faulty {
    fn launch(&mut self, b: &Batch<'_>, on: &mut dyn FnMut(u32)) -> Result<(), RunError> {
        (self.fault)(&mut self.inner, b, on, &mut self.out)
    }
    fn collect(&mut self, _: &Batch<'_>, out: &mut Vec<TokenOut>) -> Result<(), RunError> {
        out.append(&mut self.out);
        Ok(())
    }
}

fn verdict(fault: Fault) -> &'static str {
    let setup = setup(4);
    let inner = || FakeModel::new(setup.geometry.clone(), setup.vocab);
    let make = || Faulty { inner: inner(), fault, out: Vec::new() };
    check(&setup, make).err().map_or("passes", |violation| violation.rule)
}

#[test]
fn the_fake_conforms() {
    for block_size in [1, 2, 4, 16] {
        let setup = setup(block_size);
        assert_eq!(check(&setup, || FakeModel::new(setup.geometry.clone(), setup.vocab)), Ok(()));
        assert_eq!(check(&setup, || FakeModel::new(setup.geometry.clone(), setup.vocab).late()), Ok(()));
    }
}

#[test]
fn each_planted_fault_is_found() {
    assert_eq!(verdict(|m, b, on, out| m.run(b, on, out)), "passes");
    let late = verdict(|m, b, on, out| m.run(b, &mut |layer| on(2 - layer), out));
    assert_eq!(late, "on_layer: every layer once, ascending");
    let silent = verdict(|m, b, _, out| m.run(b, &mut |_| {}, out));
    assert_eq!(silent, "on_layer: every layer once, ascending");
    let swapped = verdict(|m, b, on, out| {
        m.run(b, on, out)?;
        if out.iter().all(|token| token.index == out[0].index) {
            out.reverse();
        }
        Ok(())
    });
    // All indices are the same, so only the tokens show it.
    assert_eq!(swapped, "batch invariance");
    let one_short = verdict(|m, b, on, out| {
        m.run(b, on, out)?;
        out.truncate(4);
        Ok(())
    });
    assert_eq!(one_short, "what each row scores and samples, in row order");
    // A chunk's first score is another one.
    let scored = verdict(|m, b, on, out| {
        m.run(b, on, out)?;
        let chunk = b.rows.first().is_some_and(|row| row.start > 0 && row.score.is_some());
        out.iter_mut().take(usize::from(chunk)).for_each(|token| token.logprob = Some(-9.0));
        Ok(())
    });
    assert!(scored.starts_with("chunking invariance"), "{scored}");
    // The last row's result depends on how many rows there are.
    let batch_dependent = verdict(|m, b, on, out| {
        m.run(b, on, out)?;
        out.iter_mut().for_each(|token| token.id = (token.id + u32::from(b.rows.len() > 1)) % 1000);
        Ok(())
    });
    assert_eq!(batch_dependent, "batch invariance");
    // The result depends on where in the pool the sequence lies.
    let placed = verdict(|m, b, on, out| {
        m.run(b, on, out)?;
        let ordered = b.rows.iter().all(|row| row.tables[0].blocks().is_sorted_by(|a, b| b.0 == a.0 + 1));
        out.iter_mut().for_each(|token| token.id = (token.id + u32::from(!ordered)) % 1000);
        Ok(())
    });
    assert_eq!(placed, "block tables are followed");
    // The KV of a chunk's first token is lost.
    let chunked = verdict(|m, b, on, out| {
        m.run(b, on, out)?;
        for row in b.rows.iter().filter(|row| row.start > 0 && row.tokens.len() < 4 && row.sample.is_none()) {
            let slot =
                row.tables[0].slot(row.start, 4).map_or(0, |(block, slot)| block.0 as usize * 64 + slot as usize * 8);
            m.memory_mut().store(slot, &[0]);
        }
        Ok(())
    });
    assert!(chunked.starts_with("chunking invariance"), "{chunked}");
    let uncopied = verdict(|m, b, on, out| m.run(&Batch { copies: &[], ..*b }, on, out));
    assert_eq!(uncopied, "computed again from its own prefix");
}
