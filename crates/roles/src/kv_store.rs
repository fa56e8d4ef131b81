//! The role of a KV store: none. Prefixes come and go by [`crate::exchange`], and to and from the tiers below the pool by [`crate::tiers`], as at
//! every worker. Nothing else is asked of it.

use std::convert::Infallible;

use baton_engine::{Engine, Event};

use crate::submit::Desk;
use crate::worker::RoleCore;

/// A KV store.
#[derive(Clone, Copy, Debug)]
pub struct KvStore;

impl RoleCore for KvStore {
    type Command = Infallible;
    type Effect = Infallible;

    fn command(&mut self, _: Desk<'_>, command: Infallible, _: &mut Vec<Infallible>) {
        match command {}
    }

    /// Exchanges and loads hear of their own sequences, and there are no others: this is about one that they have given up.
    fn event(&mut self, _: &mut Engine, event: Event, _: &mut Vec<Infallible>) {
        tracing::debug!(seq = %event.seq(), "an event of a prefix that was given up");
    }
}
