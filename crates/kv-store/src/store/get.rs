//! Blocks that are wanted.

use baton_kv_cache::BlockName;

use super::{Flight, Source, Store, Waiting};
use crate::index::Node;
use crate::{Block, BlockKey, Buffer, Effect, Expect, Job, Mismatch, Miss, ObjectName, Place, ReadError, Ticket, Tier};

impl Store {
    pub(super) fn get(&mut self, ticket: Ticket, wanted: BlockKey) {
        if let Err(why) = self.try_get(ticket, wanted) {
            self.miss(ticket, why);
        }
    }

    fn try_get(&mut self, ticket: Ticket, wanted: BlockKey) -> Result<(), Miss> {
        let node = self.index.get(wanted.name).ok_or(Miss::Absent)?;
        if self.waiting.contains_key(&ticket) || self.waiting.len() >= self.config.limits.tickets as usize {
            return Err(Miss::Busy);
        }
        if let Some(copy) = &node.host {
            copy.block.key.serves(&wanted).map_err(|_| Miss::Differs)?;
            let (buffer, block) = (copy.buffer, copy.block.clone());
            self.index.touch(wanted.name);
            self.hand_out(ticket, buffer, block, Tier::Host);
            return Ok(());
        }
        if wanted.groups & !node.groups != 0 {
            return Err(Miss::Differs);
        }
        let from = match node.disk {
            Some(place) => Source::Disk(place),
            None if self.reachable() => {
                Source::Object(ObjectName { name: wanted.name, parent: node.parent, groups: node.groups })
            }
            None => return Err(Miss::Failed),
        };
        let job = match self.reading.get(&wanted.name) {
            Some(job) => *job,
            None => self.read_up(wanted.name, from)?,
        };
        if let Some(Flight::Get { tickets, .. }) = self.flights.get_mut(&job) {
            tickets.push(ticket);
            self.waiting.insert(ticket, Waiting::Read { job, wanted });
        }
        Ok(())
    }

    /// Begins to bring a block into host memory.
    fn read_up(&mut self, name: BlockName, from: Source) -> Result<Job, Miss> {
        let fetches = self.objects.as_ref().map_or(0, |objects| objects.fetching);
        let most = self.config.limits.fetches;
        let fetch = matches!(from, Source::Object(_));
        if (fetch && fetches >= most) || self.reading.len() - fetches as usize >= self.config.limits.reads as usize {
            return Err(Miss::Busy);
        }
        let buffer = self.buffer().ok_or(Miss::Busy)?;
        let job = self.fly(Flight::Get { name, from, buffer, tickets: Vec::new() });
        self.reading.insert(name, job);
        match from {
            Source::Disk(place) => self.read_record(job, place, buffer, name),
            Source::Object(object) => {
                self.objects.iter_mut().for_each(|objects| objects.fetching += 1);
                let expect = Expect { identity: self.config.identity, place: Place::NOWHERE, name };
                self.effects.push_back(Effect::Fetch { job, object, into: buffer, expect });
            }
        }
        Ok(job)
    }

    pub(super) fn read_record(&mut self, job: Job, place: Place, into: Buffer, name: BlockName) {
        if let Some(disk) = &mut self.disk {
            disk.segments.read_begins(place);
        }
        let expect = Expect { identity: self.config.identity, place, name };
        self.effects.push_back(Effect::Read { job, place, into, expect });
    }

    pub(super) fn read(&mut self, job: Job, mut result: Result<Block, ReadError>) {
        if !matches!(self.flights.get(&job), Some(Flight::Get { .. } | Flight::Move { .. })) {
            return;
        }
        match self.flights.remove(&job) {
            Some(Flight::Get { name, from, buffer, tickets }) => {
                let tier = match from {
                    Source::Disk(place) => {
                        self.read_ended(name, place, &result);
                        Tier::Disk
                    }
                    Source::Object(object) => {
                        // The index has only its name to go by.
                        if result.as_ref().is_ok_and(|block| ObjectName::of(block) != object) {
                            result = Err(ReadError::Mismatch(Mismatch::Groups));
                        }
                        self.fetch_ended(object, &result);
                        Tier::Object
                    }
                };
                self.reading.remove(&name);
                self.come_up(tier, buffer, tickets, result);
            }
            Some(Flight::Move { name, place, buffer }) => {
                self.read_ended(name, place, &result);
                self.moved_up(name, place, buffer, result.ok());
            }
            _ => {}
        }
    }

    /// Accounts for a read. What cannot be read, or is not what it should be, is forgotten.
    fn read_ended(&mut self, name: BlockName, place: Place, result: &Result<Block, ReadError>) {
        if let Some(disk) = &mut self.disk {
            disk.segments.read_ended(place);
        }
        self.counters.read_bytes += self.config.shape.stride() as u64;
        match result {
            Ok(_) => return,
            Err(ReadError::Mismatch(_)) => self.counters.verify_failures[Tier::Disk as usize] += 1,
            Err(ReadError::Io | ReadError::Absent) => self.counters.disk_errors += 1,
        }
        if self.index.get(name).is_some_and(|node| node.disk == Some(place)) {
            self.drop_copy(name, Tier::Disk);
        }
    }

    /// Accounts for a fetch. An object that is not there, or is not what it should be, is forgotten. One that did not come may come later.
    fn fetch_ended(&mut self, object: ObjectName, result: &Result<Block, ReadError>) {
        self.objects.iter_mut().for_each(|objects| objects.fetching -= 1);
        match result {
            Ok(_) => {
                self.counters.read_bytes += crate::object_bytes(&self.config.shape);
                return self.read_succeeded();
            }
            Err(ReadError::Io) => return self.read_failed(),
            Err(ReadError::Absent) => {}
            Err(ReadError::Mismatch(_)) => self.counters.verify_failures[Tier::Object as usize] += 1,
        }
        let same = |node: &Node| (node.parent, node.groups) == (object.parent, object.groups);
        if self.index.get(object.name).is_some_and(same) {
            self.drop_copy(object.name, Tier::Object);
        }
    }

    /// Hands a block that was read to those who wait for it.
    fn come_up(&mut self, tier: Tier, buffer: Buffer, tickets: Vec<Ticket>, result: Result<Block, ReadError>) {
        let block = match result {
            Ok(block) => block,
            Err(error) => {
                self.buffers.release(buffer);
                let why = match error {
                    ReadError::Io => Miss::Failed,
                    ReadError::Absent => Miss::Absent,
                    ReadError::Mismatch(_) => Miss::Damaged,
                };
                for ticket in tickets {
                    self.waiting.remove(&ticket);
                    self.miss(ticket, why);
                }
                return;
            }
        };
        let name = block.key.name;
        self.keep(block.clone(), buffer);
        for ticket in tickets {
            let Some(Waiting::Read { wanted, .. }) = self.waiting.remove(&ticket) else { continue };
            let copy = self.index.get(name).and_then(|node| node.host.as_ref());
            let found = copy.filter(|copy| copy.block.key.serves(&wanted).is_ok());
            match found.map(|copy| (copy.buffer, copy.block.clone())) {
                Some((buffer, block)) => self.hand_out(ticket, buffer, block, tier),
                None => self.miss(ticket, Miss::Differs),
            }
        }
    }

    fn hand_out(&mut self, ticket: Ticket, buffer: Buffer, block: Block, tier: Tier) {
        let name = block.key.name;
        self.buffers.hold(buffer);
        self.set_busy(name, buffer, true);
        self.waiting.insert(ticket, Waiting::Lease { buffer, name });
        self.counters.hit_tokens[tier as usize] += block.key.tokens.len() as u64;
        let parts = self.config.shape.parts(block.key.groups);
        self.counters.hit_bytes[tier as usize] += parts.map(|part| part.range.len() as u64).sum::<u64>();
        self.effects.push_back(Effect::Ready(ticket, buffer, block, tier));
    }

    pub(super) fn done(&mut self, ticket: Ticket, verified: bool) {
        if !matches!(self.waiting.get(&ticket), Some(Waiting::Lease { .. })) {
            return;
        }
        let Some(Waiting::Lease { buffer, name }) = self.waiting.remove(&ticket) else { return };
        let uses = self.buffers.release(buffer);
        // One use is that of the index.
        self.set_busy(name, buffer, uses > 1);
        if !verified {
            self.counters.verify_failures[Tier::Host as usize] += 1;
            let same = |node: &Node| node.host.as_ref().is_some_and(|copy| copy.buffer == buffer);
            if self.index.get(name).is_some_and(same) {
                self.drop_copy(name, Tier::Host);
            }
        }
    }

    pub(super) fn set_busy(&mut self, name: BlockName, buffer: Buffer, busy: bool) {
        self.index.update(name, |node| {
            if let Some(copy) = node.host.as_mut().filter(|copy| copy.buffer == buffer) {
                copy.busy = busy;
            }
        });
    }

    pub(super) fn cancel(&mut self, ticket: Ticket) {
        match self.waiting.get(&ticket) {
            Some(Waiting::Read { job, .. }) => {
                if let Some(Flight::Get { tickets, .. }) = self.flights.get_mut(job) {
                    tickets.retain(|waiting| *waiting != ticket);
                }
                self.waiting.remove(&ticket);
            }
            Some(Waiting::Lease { .. }) => self.done(ticket, true),
            Some(Waiting::Fill { .. }) => self.filled(ticket, None),
            None => {}
        }
    }

    fn miss(&mut self, ticket: Ticket, why: Miss) {
        self.counters.missed[why as usize] += 1;
        self.effects.push_back(Effect::Missed(ticket, why));
    }
}
