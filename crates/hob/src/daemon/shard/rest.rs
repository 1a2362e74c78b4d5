//! Bringing the front ends of a shard to rest, so that another program can go on with their connections.
//!
//! At rest nothing that a client, a file or a machine has asked for is unanswered, and nothing more is taken from them: what they send
//! waits in the kernel, or in the guest's memory. Clients in the middle of a request have a limited time for the rest of it.

use hob_engine::units::Instant;

use super::Shard;
use crate::daemon::shard_api::{Answer, AtRest};

impl Shard {
    /// Begins to bring everything to rest.
    pub(super) fn rest(&mut self, now: Instant, answer: Answer<()>) {
        self.clients.set_resting(Some(now), &mut self.ring);
        self.files.set_resting(true, &mut self.ring);
        self.machines.set_resting(true);
        self.at_rest = Some(answer);
    }

    /// Goes on as before.
    pub(super) fn resume(&mut self) {
        self.at_rest = None;
        self.clients.set_resting(None, &mut self.ring);
        self.files.set_resting(false, &mut self.ring);
        self.machines.set_resting(false);
    }

    /// Says so when nothing is unanswered any more.
    pub(super) fn check_rest(&mut self) {
        if self.at_rest.is_some()
            && self.clients.are_at_rest()
            && self.files.are_at_rest()
            && self.machines.are_at_rest()
        {
            let _ = self.at_rest.take().expect("just looked at").send(Ok(()));
        }
    }

    /// Lets go of what is at rest.
    pub(super) fn hand_over(&mut self) -> AtRest {
        AtRest {
            clients: self.clients.hand_over(&mut self.ring),
            files: self.files.hand_over(&mut self.ring),
        }
    }
}
