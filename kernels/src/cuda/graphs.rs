//! Decides which decode steps are launched as a graph, by size. Pure: it only names graphs.
//!
//! A step's rows are padded to one of a few sizes, so that most steps have a size that was seen before. The first step of a size runs
//! launch by launch, which loads its kernels. The second is captured. Later ones are a single launch.

use super::device::Graph;

/// Most graphs that are kept; the least recently used one is freed first (I5).
const KEPT: usize = 64;

/// Key of a graph: all that launches depend on, except the contents of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Size {
    /// Rows, padding included.
    pub rows: usize,
    /// Launches of attention in each layer.
    pub passes: usize,
    /// Whether the step also samples its tokens.
    pub draws: bool,
}

/// Rows that a step of `rows` decode rows is padded to: powers of two up to 8, multiples of 8 up to 64, then multiples of 32, since a few
/// more rows cost little there.
pub(super) fn bucket(rows: usize) -> usize {
    match rows {
        ..=8 => rows.next_power_of_two(),
        9..=64 => rows.next_multiple_of(8),
        _ => rows.next_multiple_of(32),
    }
}

/// How to run a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    Run,
    Capture,
    Replay(Graph),
}

/// A size that was seen, with its graph if it was captured.
struct Known {
    size: Size,
    graph: Option<Graph>,
}

/// The graphs of a backend.
#[derive(Default)]
pub(super) struct Graphs {
    /// Least recently used first.
    known: Vec<Known>,
}

impl Graphs {
    pub fn next(&mut self, size: Size) -> Next {
        match self.known.iter().position(|known| known.size == size) {
            None => Next::Run,
            Some(at) => {
                let known = self.known.remove(at);
                let graph = known.graph;
                self.known.push(known);
                graph.map_or(Next::Capture, Next::Replay)
            }
        }
    }

    /// Notes that a step of this size was done, with its graph if it was captured. Returns a graph that must be freed in exchange.
    #[must_use]
    pub fn done(&mut self, size: Size, graph: Option<Graph>) -> Option<Graph> {
        if let Some(known) = self.known.iter_mut().find(|known| known.size == size) {
            return std::mem::replace(&mut known.graph, graph);
        }
        self.known.push(Known { size, graph });
        if self.known.len() > KEPT { self.known.remove(0).graph } else { None }
    }

    /// Forgets all sizes and returns their graphs.
    pub fn clear(&mut self) -> impl Iterator<Item = Graph> + '_ {
        self.known.drain(..).filter_map(|known| known.graph)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_few_and_near() {
        let all: Vec<usize> = (1..=256).map(bucket).collect();
        assert_eq!([1, 2, 3, 5, 8, 9, 16, 17, 64, 65, 256].map(bucket), [1, 2, 4, 8, 8, 16, 16, 24, 64, 96, 256]);
        assert!((1..=256).zip(&all).all(|(rows, &padded)| rows <= padded && padded < rows + 32));
        let mut few = all;
        few.dedup();
        assert_eq!(few.len(), 17);
    }

    #[test]
    fn a_size_is_run_then_captured_then_replayed_and_few_are_kept() {
        let (mut graphs, size) = (Graphs::default(), |rows| Size { rows, passes: 1, draws: false });
        for rows in 0..KEPT {
            assert_eq!(graphs.next(size(rows)), Next::Run);
            assert_eq!(graphs.done(size(rows), None), None);
            assert_eq!(graphs.next(size(rows)), Next::Capture);
            assert_eq!(graphs.done(size(rows), Some(Graph(rows))), None);
        }
        assert_eq!(graphs.next(Size { passes: 2, ..size(0) }), Next::Run, "another size");
        assert_eq!(graphs.next(Size { draws: true, ..size(0) }), Next::Run, "and another");
        assert_eq!(graphs.next(size(0)), Next::Replay(Graph(0)));
        assert_eq!(graphs.done(size(KEPT), None), Some(Graph(1)), "0 was used since");
        assert_eq!(graphs.next(size(1)), Next::Run);
        assert_eq!(graphs.clear().count(), KEPT - 1);
        assert_eq!(graphs.next(size(0)), Next::Run);
    }
}
