//! The handoff's state machine: one transition table for both ends.
//!
//! Pure: no I/O, no clock. The decode end keeps one state per reservation, the prefill end one per handoff. Each end carries out the
//! [`Action`] of a step in its own way. What each input means on each side:
//!
//! | input | decode | prefill |
//! | --- | --- | --- |
//! | Reserve | blocks set aside, descriptor made | descriptor read |
//! | Grant | a peer asked for access, with the right key | the decode side granted access |
//! | Write | a Write frame arrived | a batch is about to leave |
//! | Verify | every digest matches | the decode side said so |
//! | Refute | a digest, write or completion is wrong | the decode side said so or refused; or access was never asked for |
//! | Abort | the owner takes the blocks back | the owner gives up, or the session ended |
//! | Expire | the lease ran out | the deadline passed, or the peer was silent or granted no access in time |
//! | Fenced | the peer said that it has stopped, or only this end writes | this end has stopped, and says so |
//! | Lost | the connection ended, or the peer broke the protocol | not used |
//! | Severed | the peer provably cannot write any more | not used |
//! | Release | the owner is done with the verified blocks | the outcome is being reported |

/// The state of a handoff.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum State {
    /// No blocks are set aside yet.
    Offered,
    /// Blocks are set aside under an epoch; nobody may write yet.
    Reserved,
    /// One peer may write.
    Transferring,
    /// All blocks arrived and match their digests; the peer has nothing in flight.
    Verified,
    /// Over: nobody writes, the blocks may be reused.
    Released,
    /// Given up while the peer may still write (I3).
    Aborted,
    /// Ran out of time while the peer may still write (I3).
    Expired,
}

/// What can happen to a handoff. The module's table says what each input means on each side.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[allow(missing_docs)]
pub enum Input {
    Reserve,
    Grant,
    Write,
    Verify,
    Refute,
    Abort,
    Expire,
    Fenced,
    Lost,
    Severed,
    Release,
}

/// What an end must do after a step.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Action {
    /// Nothing.
    Nothing,
    /// The input is not allowed in this state: answer the peer with an error, touch no block.
    Refuse,
    /// Let the peer begin (decode), or begin (prefill).
    Begin,
    /// Apply the write.
    Apply,
    /// Tell the owner that the KV is verified.
    Announce,
    /// Stop the peer (decode) or the copying (prefill). The blocks are not free until Fenced or Severed.
    Fence,
    /// Tell the owner of the failure, and fence.
    FailAndFence,
    /// Tell the owner of the failure; the blocks are free.
    FailAndFree,
    /// The blocks are free.
    Free,
}

impl State {
    /// Every state.
    pub const ALL: [State; 7] = [
        State::Offered,
        State::Reserved,
        State::Transferring,
        State::Verified,
        State::Released,
        State::Aborted,
        State::Expired,
    ];
}

impl Input {
    /// Every input.
    pub const ALL: [Input; 11] = [
        Input::Reserve,
        Input::Grant,
        Input::Write,
        Input::Verify,
        Input::Refute,
        Input::Abort,
        Input::Expire,
        Input::Fenced,
        Input::Lost,
        Input::Severed,
        Input::Release,
    ];
}

/// The transition table: the next state and what to do.
pub fn step(state: State, input: Input) -> (State, Action) {
    use Action::*;
    use Input::*;
    use State::*;
    match (state, input) {
        (Offered, Reserve) => (Reserved, Nothing),
        (Offered, Abort) => (Released, Free),
        (Offered, Expire) => (Released, FailAndFree),
        (Offered, Lost | Severed | Fenced) => (Offered, Nothing),
        (Offered, Grant | Write | Verify | Refute | Release) => (Offered, Refuse),

        (Reserved, Grant) => (Transferring, Begin),
        // Nobody ever had access, so nobody has to be stopped.
        (Reserved, Abort) => (Released, Free),
        (Reserved, Expire | Refute | Lost | Severed | Fenced) => (Released, FailAndFree),
        (Reserved, Reserve | Write | Verify | Release) => (Reserved, Refuse),

        (Transferring, Write) => (Transferring, Apply),
        (Transferring, Verify) => (Verified, Announce),
        // A completion follows all its writes and a refused write is not applied, so the peer has nothing in flight.
        (Transferring, Refute | Fenced | Severed) => (Released, FailAndFree),
        (Transferring, Abort) => (Aborted, Fence),
        (Transferring, Expire) => (Expired, FailAndFence),
        // A closed connection alone does not prove that a mapping is gone.
        (Transferring, Lost) => (Aborted, FailAndFence),
        (Transferring, Reserve | Grant | Release) => (Transferring, Refuse),

        (Verified, Release | Abort) => (Released, Free),
        (Verified, Expire | Fenced | Lost | Severed) => (Verified, Nothing),
        (Verified, Reserve | Grant | Write | Verify | Refute) => (Verified, Refuse),

        (Aborted | Expired, Fenced | Severed) => (Released, Free),
        (Aborted | Expired, Abort | Expire | Lost) => (state, Nothing),
        (Aborted | Expired, Reserve | Grant | Write | Verify | Refute | Release) => (state, Refuse),

        (Released, Abort | Expire | Fenced | Lost | Severed) => (Released, Nothing),
        (Released, Reserve | Grant | Write | Verify | Refute | Release) => (Released, Refuse),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn table() -> String {
        let mut text = String::new();
        for state in State::ALL {
            for input in Input::ALL {
                let (next, action) = step(state, input);
                text += &format!(
                    "{:<12} {:<7} -> {:<12} {action:?}\n",
                    format!("{state:?}"),
                    format!("{input:?}"),
                    format!("{next:?}")
                );
            }
        }
        text
    }

    fn graph() -> String {
        let mut edges: BTreeMap<(State, State, Action), Vec<String>> = BTreeMap::new();
        for state in State::ALL {
            for input in Input::ALL {
                let (next, action) = step(state, input);
                if next != state || action == Action::Apply {
                    edges.entry((state, next, action)).or_default().push(format!("{input:?}"));
                }
            }
        }
        let mut text = String::from("stateDiagram-v2\n    [*] --> Offered\n");
        for ((from, to, action), inputs) in edges {
            text += &format!("    {from:?} --> {to:?}: {} / {action:?}\n", inputs.join(", "));
        }
        text + "    Released --> [*]\n"
    }

    #[test]
    fn every_pair_is_as_committed() {
        let table = table();
        assert_eq!(table, include_str!("state.snapshot.txt"), "the table is now:\n{table}");
    }

    #[test]
    fn the_readme_shows_this_graph() {
        let graph = graph();
        let readme = include_str!("../README.md");
        assert!(readme.contains(&graph), "README.md must show:\n{graph}");
    }

    #[test]
    fn blocks_are_free_only_when_nobody_can_write() {
        // I3: once a peer had access, blocks become free only by its word, the end of a verified or refuted handoff, or its proven death.
        let proof = [Input::Fenced, Input::Severed, Input::Refute, Input::Release];
        for input in Input::ALL {
            for state in [State::Transferring, State::Aborted, State::Expired] {
                let (next, _) = step(state, input);
                assert!(next != State::Released || proof.contains(&input), "{state:?} {input:?}");
            }
        }
    }

    #[test]
    fn a_handoff_ends_once() {
        // No input leads out of Released, and no handoff is announced, failed or freed twice.
        for input in Input::ALL {
            let (next, action) = step(State::Released, input);
            assert_eq!(next, State::Released);
            assert!(matches!(action, Action::Nothing | Action::Refuse));
            let (next, action) = step(State::Verified, input);
            assert!(!matches!(action, Action::Announce | Action::FailAndFree | Action::FailAndFence), "{next:?}");
        }
    }
}
