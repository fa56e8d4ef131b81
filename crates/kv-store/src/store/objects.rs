//! The object tier: what is uploaded, fetched and removed, and when all of that rests.
//!
//! A block is uploaded from host memory, while it is there, by the disk's rule of admission. What is there is known by a listing; until it has
//! come, nothing is uploaded or fetched. A call that fails makes its like rest: a store that is away costs its readers one patience in a while,
//! and then nothing.
//!
//! Reads (listings and fetches) and writes (uploads and removals) rest apart, as on the disk: a bucket that is full or may only be read still has
//! what is in it. What fails is not asked whether it concerns both, as a lost connection does: writes then find out by themselves, with no more calls
//! than are in flight at once, and nobody waits for them.

use std::collections::BTreeSet;

use baton_kv_cache::BlockName;

use super::demote::MOST_AHEAD;
use super::disk::Pause;
use super::{Flight, Store};
use crate::index::Node;
use crate::{Block, Buffer, Effect, Head, Job, ObjectConfig, ObjectName, Place, Tier};

/// What is known of the objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    Nothing,
    /// A listing is on its way.
    Asked,
    All,
}

/// The object tier.
#[derive(Debug)]
pub(super) struct Objects {
    most: u64,
    known: Known,
    /// The listing ended before all was listed.
    more: bool,
    /// When listings and fetches go on after a failure, and when uploads and removals do.
    reads: Pause,
    writes: Pause,
    /// Blocks to upload, the latest last.
    ahead: Vec<BlockName>,
    uploading: BTreeSet<ObjectName>,
    /// Objects that may be there, since their uploads may have failed.
    doubtful: BTreeSet<ObjectName>,
    /// Objects that are to be removed, and those that are being removed.
    doomed: BTreeSet<ObjectName>,
    removing: BTreeSet<ObjectName>,
    pub fetching: u32,
}

impl Objects {
    pub fn new(config: ObjectConfig) -> Objects {
        Objects {
            most: config.most,
            known: Known::Nothing,
            more: false,
            reads: Pause::default(),
            writes: Pause::default(),
            ahead: Vec::new(),
            uploading: BTreeSet::new(),
            doubtful: BTreeSet::new(),
            doomed: BTreeSet::new(),
            removing: BTreeSet::new(),
            fetching: 0,
        }
    }

    /// Whether a listing is on its way.
    pub fn asked(&self) -> bool {
        self.known == Known::Asked
    }

    /// Most objects that are listed at once.
    fn listed_at_once(&self) -> u64 {
        self.most.saturating_mul(2)
    }

    /// Objects that are not held, and take space or will.
    fn besides(&self) -> u64 {
        (self.uploading.len() + self.doubtful.len() + self.doomed.len() + self.removing.len()) as u64
    }

    /// Whether an object is on its way there, or out.
    fn moves(&self, object: &ObjectName) -> bool {
        self.uploading.contains(object) || self.doomed.contains(object) || self.removing.contains(object)
    }
}

impl Store {
    /// Whether objects can be fetched now.
    pub(super) fn reachable(&self) -> bool {
        self.objects.as_ref().is_some_and(|objects| objects.reads.over(self.now))
    }

    /// Lists, removes and uploads, as far as limits allow.
    pub(super) fn objects_on(&mut self) {
        let Some(objects) = &mut self.objects else { return };
        let (reads, writes) = (objects.reads.over(self.now), objects.writes.over(self.now));
        if reads && objects.more && objects.doomed.is_empty() && objects.removing.is_empty() {
            (objects.known, objects.more) = (Known::Nothing, false);
        }
        match objects.known {
            Known::Nothing if reads => {
                objects.known = Known::Asked;
                // More at once would take memory without bound. Where there are more, they are listed when what is too much is removed.
                self.effects.push_back(Effect::List { most: objects.listed_at_once() });
            }
            Known::All if writes => {
                // Before removals: nothing else may happen that would begin them.
                self.forget_doubtful();
                self.remove_on();
                self.upload_on();
            }
            Known::Nothing | Known::Asked | Known::All => {}
        }
    }

    /// Takes in what is there, the oldest first. None: the store did not say.
    pub(super) fn listed(&mut self, found: Option<Vec<ObjectName>>) {
        let Some(objects) = self.objects.as_mut().filter(|objects| objects.known == Known::Asked) else { return };
        let Some(found) = found else {
            objects.known = Known::Nothing;
            return self.read_failed();
        };
        objects.known = Known::All;
        objects.more = found.len() as u64 >= objects.listed_at_once();
        objects.reads.succeeded();
        let groups = self.config.shape.all_groups();
        for (at, object) in (0..).zip(found).filter(|(_, object)| object.groups & !groups == 0) {
            self.enter_object(at, object);
        }
        while self.index.held(Tier::Object) > self.config.object.map_or(0, |object| object.most) {
            let Some(name) = self.victim(Tier::Object) else { break };
            self.evict(name, Tier::Object);
        }
    }

    fn enter_object(&mut self, at: u64, object: ObjectName) {
        let ObjectName { name, parent, groups } = object;
        let known = self.index.get(name);
        let moves = self.objects.as_ref().is_some_and(|objects| objects.moves(&object));
        let same = |node: &Node| (node.parent, node.groups) == (parent, groups);
        if moves || known.is_some_and(|node| node.object && same(node)) {
            return;
        }
        if known.is_some_and(|node| !same(node)) {
            // The block has other layer groups by now.
            return self.doom(object);
        }
        let usage = self.index.ranking.before(at);
        self.index.change(name, || Node::new(parent, groups, usage), |node, _| node.object = true);
        self.counters.recovered += 1;
        self.effects.push_back(Effect::Stored(name, Tier::Object));
    }

    /// An object is to be removed.
    pub(super) fn doom(&mut self, object: ObjectName) {
        if let Some(objects) = &mut self.objects {
            objects.doomed.insert(object);
        }
    }

    fn remove_on(&mut self) {
        let limit = self.config.limits.removals as usize;
        while let Some(objects) = self.objects.as_mut().filter(|objects| objects.removing.len() < limit) {
            let Some(object) = objects.doomed.pop_first() else { return };
            objects.removing.insert(object);
            let job = self.fly(Flight::Remove { object });
            self.effects.push_back(Effect::Remove { job, object });
        }
    }

    /// Notes a block in host memory that is worth an upload.
    pub(super) fn look_up(&mut self, name: BlockName) {
        let worth = self.worth_uploading(name).is_some();
        if let Some(objects) = self.objects.as_mut().filter(|objects| worth && objects.ahead.len() < MOST_AHEAD) {
            objects.ahead.push(name);
        }
    }

    /// Notes all that is in host memory and not there.
    pub(super) fn flush_objects(&mut self) {
        let Some(objects) = &mut self.objects else { return };
        let alone = self.index.all().filter(|(_, node)| node.host.is_some() && !node.object);
        let mut alone: Vec<_> = alone.map(|(name, node)| (node.usage.last, name)).collect();
        alone.sort_unstable();
        objects.ahead = alone.into_iter().map(|(_, name)| name).collect();
    }

    /// Admission: the buffer of a block in host memory that should be in the object store, and is neither there nor on its way.
    fn worth_uploading(&self, name: BlockName) -> Option<(Buffer, Block)> {
        let (objects, node) = self.objects.as_ref().zip(self.index.get(name))?;
        let copy = node.host.as_ref().filter(|_| !node.object)?;
        let uses = self.sketch.count(name).max(1);
        let new = uses >= self.config.min_uses && !objects.moves(&ObjectName::of(&copy.block));
        new.then(|| (copy.buffer, copy.block.clone()))
    }

    fn upload_on(&mut self) {
        let limit = self.config.limits.uploads as usize;
        while let Some(objects) = self.objects.as_mut().filter(|objects| objects.uploading.len() < limit) {
            let Some(name) = objects.ahead.pop() else { return };
            let Some((buffer, block)) = self.worth_uploading(name) else { continue };
            if !self.room_for_object(&ObjectName::of(&block)) {
                if let Some(objects) = &mut self.objects {
                    objects.ahead.push(name);
                }
                return;
            }
            self.upload(block, buffer);
        }
    }

    /// Whether there is room for one more. Else begins to make room.
    fn room_for_object(&mut self, object: &ObjectName) -> bool {
        let Some(objects) = &self.objects else { return false };
        let (most, besides) = (objects.most, objects.besides());
        if self.index.held(Tier::Object) + besides < most || objects.doubtful.contains(object) {
            return true;
        }
        // What is being removed makes room, too.
        let leaving = objects.doomed.len() + objects.removing.len();
        if leaving == 0
            && let Some(name) = self.victim(Tier::Object)
        {
            self.evict(name, Tier::Object);
            self.remove_on();
        }
        false
    }

    /// What may be there, and is no longer in host memory to be uploaded again, is removed.
    fn forget_doubtful(&mut self) {
        let doubtful = self.objects.iter().flat_map(|objects| objects.doubtful.iter().copied());
        let lost: Vec<ObjectName> = doubtful.filter(|object| !self.may_upload(object)).collect();
        for object in lost {
            if let Some(objects) = &mut self.objects {
                objects.doubtful.remove(&object);
            }
            self.doom(object);
        }
    }

    /// Whether an object's block is in host memory, and wanted in the object store.
    fn may_upload(&self, object: &ObjectName) -> bool {
        self.index.get(object.name).is_some_and(|node| {
            node.host.is_some() && !node.object && (node.parent, node.groups) == (object.parent, object.groups)
        })
    }

    fn upload(&mut self, block: Block, from: Buffer) {
        let (object, name) = (ObjectName::of(&block), block.key.name);
        self.buffers.hold(from);
        self.set_busy(name, from, true);
        if let Some(objects) = &mut self.objects {
            objects.doubtful.remove(&object);
            objects.uploading.insert(object);
        }
        let head = Head { identity: self.config.identity, place: Place::NOWHERE, block }.encode(&self.config.shape);
        let job = self.fly(Flight::Upload { object, buffer: from });
        self.effects.push_back(Effect::Upload { job, object, from, head });
    }

    pub(super) fn uploaded(&mut self, job: Job, ok: bool) {
        if !matches!(self.flights.get(&job), Some(Flight::Upload { .. })) {
            return;
        }
        let Some(Flight::Upload { object, buffer }) = self.flights.remove(&job) else { return };
        if let Some(objects) = &mut self.objects {
            objects.uploading.remove(&object);
            if ok {
                objects.writes.succeeded();
            }
        }
        let uses = self.buffers.release(buffer);
        self.set_busy(object.name, buffer, uses > 1);
        if !ok {
            self.write_failed();
        }
        let wanted = self.index.get(object.name);
        let wanted =
            wanted.is_some_and(|node| !node.object && (node.parent, node.groups) == (object.parent, object.groups));
        if ok && wanted {
            self.counters.uploaded_bytes += crate::object_bytes(&self.config.shape);
            self.index.update(object.name, |node| node.object = true);
            self.effects.push_back(Effect::Stored(object.name, Tier::Object));
        } else if let Some(objects) = self.objects.as_mut().filter(|_| !ok) {
            // It may be there all the same. It is uploaded again, if its block stays so long.
            objects.doubtful.insert(object);
            objects.ahead.push(object.name);
        } else {
            self.doom(object);
        }
    }

    pub(super) fn removed(&mut self, job: Job, ok: bool) {
        if !matches!(self.flights.get(&job), Some(Flight::Remove { .. })) {
            return;
        }
        let Some(Flight::Remove { object }) = self.flights.remove(&job) else { return };
        if let Some(objects) = &mut self.objects {
            objects.removing.remove(&object);
        }
        // One that succeeded does not end the rests of uploads: a store that is full still removes.
        if !ok {
            self.doom(object);
            self.write_failed();
        }
    }

    pub(super) fn read_succeeded(&mut self) {
        if let Some(objects) = &mut self.objects {
            objects.reads.succeeded();
        }
    }

    pub(super) fn read_failed(&mut self) {
        self.counters.object_errors += 1;
        if let Some(objects) = &mut self.objects {
            objects.reads.failed(self.now);
        }
    }

    fn write_failed(&mut self) {
        self.counters.object_errors += 1;
        if let Some(objects) = &mut self.objects {
            objects.writes.failed(self.now);
        }
    }

    /// Checks that what is uploaded and removed is what is in flight, and that no more is there than may be (I5, I6).
    pub(super) fn check_objects(&self) -> Result<(), crate::StoreError> {
        let Some(objects) = &self.objects else { return Ok(()) };
        let (mut uploads, mut removals, mut fetches) = (BTreeSet::new(), BTreeSet::new(), 0);
        for flight in self.flights.values() {
            match flight {
                Flight::Upload { object, .. } => drop(uploads.insert(*object)),
                Flight::Remove { object } => drop(removals.insert(*object)),
                Flight::Get { from: super::Source::Object(_), .. } => fetches += 1,
                _ => {}
            }
        }
        if (&uploads, &removals, fetches) != (&objects.uploading, &objects.removing, objects.fetching) {
            return Err(crate::StoreError::Broken(format!(
                "{objects:?}; in flight {uploads:?}, {removals:?}, {fetches}"
            )));
        }
        Ok(())
    }
}
