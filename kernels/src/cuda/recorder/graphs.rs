//! Captures and graphs under the recorder. Finds calls that are forbidden while a stream is being captured, and launches of a graph
//! after memory that it touches was freed.

use super::super::device::{Access, Graph, Piece, Stream};
use super::state::{Captured, State};
use crate::KernelError;

impl State {
    /// Remembers the memory that captured work touches.
    pub(super) fn capture(
        &mut self,
        what: &'static str,
        stream: Stream,
        accesses: &[Access<'_>],
    ) -> Result<(), KernelError> {
        for access in accesses {
            let (piece, writes) = match access {
                Access::Read(piece) => (piece, false),
                Access::Write(piece) => (piece, true),
            };
            let allocation = self.allocation(what, piece)?;
            let number = self.allocations.get(&allocation).map_or(0, |allocation| allocation.number);
            let captured = Captured { what, at: piece.at(), bytes: piece.bytes(), writes, number };
            self.captures.entry(stream).or_default().push(captured);
        }
        Ok(())
    }

    /// Records a problem and returns an error while this stream is being captured; for None, while any stream is.
    pub(super) fn refuse(&mut self, what: &str, stream: Option<Stream>) -> Result<(), KernelError> {
        let captured = stream.map_or(!self.captures.is_empty(), |stream| self.captures.contains_key(&stream));
        if captured { Err(self.problem(format!("{what} while a stream is captured"))) } else { Ok(()) }
    }

    /// Checks a graph's launch: all memory that its work touches must still be the memory of the capture.
    pub(super) fn replay(&mut self, stream: Stream, graph: Graph) -> Result<(), KernelError> {
        self.refuse("a graph's launch", Some(stream))?;
        let Some(work) = self.graphs.get(&graph).cloned() else {
            return Err(self.problem(format!("{graph:?} is launched and is not there")));
        };
        for Captured { what, at, bytes, writes, number } in work {
            let piece = Piece::new(at, bytes);
            let allocation = self.allocation(what, &piece)?;
            if self.allocations.get(&allocation).is_none_or(|allocation| allocation.number != number) {
                return Err(self.problem(format!("{graph:?}, {what}: its memory was freed since it was captured")));
            }
            self.touch(what, stream, &[if writes { Access::Write(piece) } else { Access::Read(piece) }])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::super::{Device, Memory, Nowhere};
    use super::super::Recorder;

    fn recorder() -> Arc<Recorder<Nowhere>> {
        Arc::new(Recorder::new(Nowhere::default()))
    }

    #[test]
    fn a_graph_whose_memory_went_is_found() {
        let device = recorder();
        let stream = device.stream().unwrap();
        let memory = Memory::new(&device, 64).unwrap();
        device.begin_capture(stream).unwrap();
        device.fill(stream, memory.piece(0, 32), 1).unwrap();
        let graph = device.end_capture(stream).unwrap();
        // SAFETY: the device has no memory.
        let replay = |graph| unsafe { device.replay(stream, graph) };
        assert!(replay(graph).is_ok());
        drop(memory);
        assert!(replay(graph).unwrap_err().to_string().contains("after it was freed"));
        assert_eq!((device.live_graphs(), device.problems().len()), (1, 1));
        device.forget(graph);
        assert!(replay(graph).unwrap_err().to_string().contains("is not there"));
        device.forget(graph);
        assert_eq!((device.live_graphs(), device.problems().len()), (0, 3));
    }

    #[test]
    fn what_a_capture_must_not_be_asked_for_is_found() {
        let device = recorder();
        let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
        let memory = Memory::new(&device, 64).unwrap();
        let piece = memory.piece(0, 8);
        device.begin_capture(stream).unwrap();
        let refused = [
            device.write(stream, piece, &[1]).err(),
            device.read(stream, piece, &mut [0]).err(),
            device.synchronise(stream).err(),
            device.allocate(8).err(),
            device.begin_capture(stream).err(),
            device.record(device.event().unwrap(), stream).err(),
        ];
        assert!(refused.iter().flatten().all(|error| error.to_string().contains("while a stream is captured")));
        assert_eq!((refused.iter().flatten().count(), device.problems().len()), (6, 6));
        device.write(other, piece, &[1]).unwrap();
        let graph = device.end_capture(stream).unwrap();
        assert!(device.end_capture(stream).is_err());
        device.forget(graph);
    }
}
