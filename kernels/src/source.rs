//! Weight matrices on their way to a backend.

use std::borrow::Cow;

use baton_types::{SeededRows, WeightData, WeightDtype};

use crate::KernelError;

/// Bytes that a thread makes, at least: below it, starting one takes longer.
const SHARE: usize = 1 << 20;

/// Which stored row becomes row `i`.
pub type RowOrder<'a> = &'a (dyn Fn(usize) -> usize + Sync);

/// A weight matrix as a file stores it, or as it is made: `rows` outputs of `cols` inputs each.
#[derive(Clone)]
pub struct WeightSource<'a> {
    /// For errors.
    pub name: &'a str,
    /// Element type.
    pub dtype: WeightDtype,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Its elements, row by row.
    pub data: WeightData<'a>,
    /// None: each stored row becomes the row of its number.
    pub row_order: Option<RowOrder<'a>>,
}

impl WeightSource<'_> {
    /// Bytes of a row, after checking that the data has the size its shape says.
    pub fn row_bytes(&self) -> Result<usize, KernelError> {
        let bad = |why: String| KernelError::Weight { name: self.name.to_owned(), why };
        let &WeightSource { dtype, rows, cols, .. } = self;
        let row_bytes = dtype
            .row_bytes(cols)
            .ok_or_else(|| bad(format!("rows of {cols} are not whole blocks of {}", dtype.block_elements())))?;
        match &self.data {
            WeightData::Stored(data) if data.len() != row_bytes * rows => {
                let want = row_bytes * rows;
                Err(bad(format!("{} bytes, a {dtype:?} matrix of {rows} x {cols} has {want}", data.len())))
            }
            WeightData::Seeded(_) if dtype != WeightDtype::Bf16 => {
                Err(bad(format!("made as {dtype:?}; what a seed makes is Bf16")))
            }
            _ => Ok(row_bytes),
        }
    }

    /// `count` rows from `first` on, as they are stored, in the order that is wanted; made by as many threads as pay where they are not.
    pub fn rows(&self, first: usize, count: usize) -> Result<Cow<'_, [u8]>, KernelError> {
        let row_bytes = self.row_bytes()?;
        let order = |i: usize| self.row_order.map_or(i, |order| order(i));
        match (&self.data, self.row_order) {
            (WeightData::Stored(data), None) => Ok(Cow::Borrowed(&data[first * row_bytes..][..count * row_bytes])),
            (WeightData::Stored(data), Some(_)) => {
                let mut out = room(count * row_bytes)?;
                (first..first + count).for_each(|i| out.extend_from_slice(&data[order(i) * row_bytes..][..row_bytes]));
                Ok(Cow::Owned(out))
            }
            (WeightData::Seeded(values), _) => {
                let wanted: Vec<usize> = (first..first + count).map(order).collect();
                let mut out = room(count * row_bytes)?;
                out.resize(count * row_bytes, 0);
                make(values, &wanted, row_bytes, &mut out);
                Ok(Cow::Owned(out))
            }
        }
    }
}

fn room(bytes: usize) -> Result<Vec<u8>, KernelError> {
    let mut out = Vec::new();
    out.try_reserve_exact(bytes).map_err(|_| KernelError::Memory { bytes })?;
    Ok(out)
}

/// Rows of these numbers, one behind the other.
fn make(values: &SeededRows, wanted: &[usize], row_bytes: usize, out: &mut [u8]) {
    let most = std::thread::available_parallelism().map_or(1, usize::from);
    let share = wanted.len().div_ceil((out.len() / SHARE).clamp(1, most)).max(1);
    let fill = |wanted: &[usize], out: &mut [u8]| {
        for (&row, out) in wanted.iter().zip(out.chunks_mut(row_bytes.max(1))) {
            values.fill_row(row, out);
        }
    };
    std::thread::scope(|scope| {
        let mut shares = wanted.chunks(share).zip(out.chunks_mut((share * row_bytes).max(1)));
        let own = shares.next();
        for (wanted, out) in shares {
            scope.spawn(move || fill(wanted, out));
        }
        if let Some((wanted, out)) = own {
            fill(wanted, out);
        }
    });
}

#[cfg(test)]
mod tests {
    use baton_types::Seeded;

    use super::*;

    fn source<'a>(rows: usize, cols: usize, data: WeightData<'a>) -> WeightSource<'a> {
        WeightSource { name: "w", dtype: WeightDtype::Bf16, rows, cols, data, row_order: None }
    }

    #[test]
    fn rows_are_the_same_made_by_several_threads_and_one_by_one_stored_and_made_in_order_and_not() {
        let (rows, cols) = (1500, 1024);
        let seeded = SeededRows { values: Seeded { key: 5, middle: 1.0, spread: 0.5 }, first: 3, stride: cols + 5 };
        let made = source(rows, cols, WeightData::Seeded(seeded));
        assert!(rows * made.row_bytes().unwrap() > 2 * SHARE, "work for several threads");
        let all = made.rows(0, rows).unwrap();
        let stored = source(rows, cols, all[..].into());
        let order = |i: usize| (i * 7 + 1) % rows;
        for (first, count) in [(0, rows), (0, 0), (700, 3), (rows - 1, 1)] {
            for i in first..first + count {
                let mut row = vec![0; 2 * cols];
                seeded.fill_row(i, &mut row);
                assert!(all[2 * i * cols..][..2 * cols] == row[..], "row {i}");
            }
            let ordered = |source: &WeightSource<'_>| {
                let ordered = WeightSource { row_order: Some(&order), ..source.clone() };
                ordered.rows(first, count).unwrap().into_owned()
            };
            assert!(made.rows(first, count).unwrap() == stored.rows(first, count).unwrap());
            assert!(ordered(&made) == ordered(&stored) && ordered(&made).len() == 2 * count * cols);
            if count == 3 {
                assert!(ordered(&made)[..2 * cols] == all[2 * order(700) * cols..][..2 * cols]);
            }
        }
    }

    #[test]
    fn what_a_seed_makes_has_one_type() {
        let seeded = SeededRows { values: Seeded { key: 5, middle: 1.0, spread: 0.5 }, first: 0, stride: 8 };
        let wrong = WeightSource { dtype: WeightDtype::F16, ..source(2, 8, WeightData::Seeded(seeded)) };
        assert!(wrong.rows(0, 1).unwrap_err().to_string().contains("w: made as F16"), "{:?}", wrong.rows(0, 1));
    }
}
