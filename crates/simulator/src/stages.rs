//! The stages of a run: faults, then calm, then rest; and what must hold at the end of each (I5, I6).

use crate::Violation;
use crate::decode::Decode;
use crate::ends::Sender;
use crate::events::Process;
use crate::faults::Fault;
use crate::kv_store::KvStore;
use crate::prefill::Prefill;
use crate::stream::Micros;
use crate::world::World;

/// Longest time from the last fault to the end of every request (I5).
const CALM: Micros = 40_000_000;
/// Longest time from the beginning of a later stage until all blocks are free (I6).
const REST: Micros = 40_000_000;

/// Stage of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    /// Requests come, faults strike.
    Stormy,
    /// There are no more faults; requests end.
    Calm,
    /// All requests have ended; blocks come back.
    Resting,
    /// All prefill workers have died, and nobody gives KV any more, so that nothing waits for a giver's answer.
    Last,
}

impl World {
    /// Ends all faults.
    pub(crate) fn heal(&mut self) {
        self.healed = true;
        self.faults.heal();
        let now = self.now;
        self.apart.values_mut().for_each(|(_, until)| *until = now.min(*until));
        let frozen = |frozen: &mut Option<(Micros, Micros)>| {
            if let Some((_, until)) = frozen {
                *until = now.min(*until);
            }
        };
        self.routers.iter_mut().for_each(|router| frozen(&mut router.frozen));
        self.prefills.iter_mut().for_each(|prefill| frozen(&mut prefill.frozen));
        self.decodes.iter_mut().for_each(|decode| frozen(&mut decode.frozen));
        self.kv_stores.iter_mut().for_each(|store| frozen(&mut store.frozen));
        if self.registry.down_until.is_some() {
            self.registry.down_until = Some(now);
            self.registry_back();
        }
        self.enter(Stage::Calm);
    }

    fn enter(&mut self, stage: Stage) {
        (self.stage, self.since) = (stage, self.now);
        self.note(|| format!("{stage:?}"));
    }

    /// Enters the next stage if it is time. True when the run is over.
    pub(crate) fn advance(&mut self) -> Result<bool, Violation> {
        match self.stage {
            Stage::Stormy => {}
            Stage::Calm if self.unended() == 0 => {
                self.look_at("I5");
                self.enter(Stage::Resting);
            }
            // I5
            Stage::Calm if self.now > self.since + CALM => {
                let open = self.clients.iter().position(|client| client.end.is_none());
                let what = format!("request {open:?} has not ended {CALM} µs after the last fault");
                return Err(self.violation("I5", what));
            }
            // Every block must come back before any process dies, unless frames were lost or out of order on a connection that stayed open.
            Stage::Resting if if self.had_unreal_faults() { self.is_quiet() } else { self.check_free().is_ok() } => {
                self.check_rest(|process| matches!(process, Process::Prefill(_)), true)?;
                for place in 0..self.prefills.len() {
                    self.restart_prefill(place, false)?;
                }
                // The others go on. The connections over which they give KV end as if they had died.
                self.cut_lines(|connection| !matches!(connection.from, Process::Prefill(_)), true);
                self.enter(Stage::Last);
            }
            Stage::Last if self.check_free().is_ok() && self.check_indexes().is_ok() => {
                self.check_rest(|_| true, false)?;
                self.check_leases()?;
                return Ok(true);
            }
            Stage::Resting | Stage::Last if self.now > self.since + REST => {
                self.check_free()?;
                self.check_indexes()?;
                return Err(self.violation("I6", "workers do not come to rest"));
            }
            _ => {}
        }
        Ok(false)
    }

    /// Whether all requests have ended after the last fault.
    pub(crate) fn has_calmed(&self) -> bool {
        matches!(self.stage, Stage::Resting | Stage::Last)
    }

    fn had_unreal_faults(&self) -> bool {
        self.faults.counts.keys().any(|fault: &Fault| fault.is_unreal())
    }

    fn unended(&self) -> usize {
        self.clients.iter().filter(|client| client.end.is_none()).count()
    }

    fn is_quiet(&self) -> bool {
        let gives = |(process, sender): (Process, &Sender)| self.is_alive(process) && !sender.handoffs.is_empty();
        let quiet = self.prefills.iter().all(Prefill::is_quiet) && self.decodes.iter().all(Decode::is_quiet);
        quiet && self.kv_stores.iter().all(KvStore::is_quiet) && !self.senders.iter().any(gives)
    }

    fn check_free(&self) -> Result<(), Violation> {
        let decodes = self.decodes.iter().enumerate().filter(|(_, decode)| decode.alive);
        let decodes = decodes.map(|(place, decode)| {
            let process = Process::Decode(place);
            decode.check_free(&self.receivers[process], &self.senders[process])
        });
        let prefills = self.prefills.iter().enumerate().filter(|(_, prefill)| prefill.alive);
        let prefills = prefills.map(|(place, prefill)| {
            let process = Process::Prefill(place);
            prefill.check_free(&self.receivers[process], &self.senders[process])
        });
        let stores = self.kv_stores.iter().enumerate().filter(|(_, store)| store.alive);
        let stores = stores.map(|(place, store)| {
            let process = Process::KvStore(place);
            store.check_free(&self.receivers[process], &self.senders[process])
        });
        decodes.chain(prefills).chain(stores).try_for_each(|checked| checked.map_err(|what| self.violation("I6", what)))
    }
}
