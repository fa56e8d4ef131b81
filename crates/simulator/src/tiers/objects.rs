//! An object store without bytes, and its faults.

use std::collections::BTreeMap;
use std::ops::Range;

use baton_kv_store::{Block, Effect, Head, Input, Job, Mismatch, ObjectName, ReadError, Shape};

/// What is wrong with an object store. 0: nothing of that kind.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ObjectFaults {
    /// One get in so many is answered only when the next prompt comes: nobody waits so long.
    pub slow: u32,
    /// One get in so many finds that somebody has removed the object.
    pub lost: u32,
    /// One get in so many finds other bytes than were put.
    pub wrong: u32,
    /// All calls fail in this time, in microseconds.
    pub away: Range<u64>,
}

/// The objects.
#[derive(Debug, Default)]
pub(super) struct Objects {
    there: BTreeMap<ObjectName, Block>,
    faults: ObjectFaults,
    gets: u32,
    /// Answers that nobody waits for any more.
    late: Vec<Input>,
    /// Faults that were played: slow, lost, wrong, away.
    pub played: [u64; 4],
}

impl Objects {
    pub fn new(faults: ObjectFaults) -> Objects {
        Objects { faults, ..Objects::default() }
    }

    /// Number of objects.
    pub fn count(&self) -> u64 {
        self.there.len() as u64
    }

    /// The answers that came too late.
    pub fn take_late(&mut self) -> Vec<Input> {
        std::mem::take(&mut self.late)
    }

    /// Carries out a call at a time in microseconds. `None`: it has no answer yet, or is none of an object store.
    pub fn call(&mut self, effect: Effect, shape: &Shape, now: u64) -> Option<Input> {
        let away = self.faults.away.contains(&now);
        let answer = match effect {
            Effect::List { .. } => Input::Listed((!away).then(|| self.there.keys().copied().collect())),
            Effect::Fetch { job, object, .. } if !away => return self.get(job, object),
            Effect::Fetch { job, .. } => Input::Read(job, Err(ReadError::Io)),
            Effect::Upload { job, object, head, .. } => {
                if !away {
                    self.there.insert(object, Head::parse(shape, &head).expect("a head").block);
                }
                Input::Uploaded(job, !away)
            }
            Effect::Remove { job, object } => {
                if !away {
                    self.there.remove(&object);
                }
                Input::Deleted(job, !away)
            }
            _ => return None,
        };
        self.played[3] += u64::from(away);
        Some(answer)
    }

    fn get(&mut self, job: Job, object: ObjectName) -> Option<Input> {
        self.gets += 1;
        let ObjectFaults { slow, lost, wrong, .. } = self.faults;
        let fault = [slow, lost, wrong].into_iter().position(|every| every > 0 && self.gets.is_multiple_of(every));
        fault.into_iter().for_each(|fault| self.played[fault] += 1);
        let found = self.there.get(&object).cloned().ok_or(ReadError::Absent);
        match fault {
            Some(0) => {
                self.late.push(Input::Read(job, found));
                None
            }
            Some(1) => {
                self.there.remove(&object);
                Some(Input::Read(job, Err(ReadError::Absent)))
            }
            Some(_) => Some(Input::Read(job, Err(ReadError::Mismatch(Mismatch::Head)))),
            None => Some(Input::Read(job, found)),
        }
    }
}
