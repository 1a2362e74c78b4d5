//! Quiescing the front ends of a shard, so that another process can continue their connections.
//!
//! A quiesced shard has answered every request of NBD clients, files and vhost-user clients, and
//! accepts no new one. New requests wait in the kernel or in the guest's memory. Clients in the
//! middle of a request have limited time to complete it.

use hob_engine::units::Instant;

use super::Shard;
use crate::api::{Answer, AtRest};

impl Shard {
    /// Starts to quiesce all front ends.
    pub(super) fn rest(&mut self, now: Instant, answer: Answer<()>) {
        self.clients.set_resting(Some(now), &mut self.ring);
        self.files.set_resting(true, &mut self.ring);
        self.vhost_user.set_resting(true);
        self.at_rest = Some(answer);
    }

    /// Ends the quiesced state.
    pub(super) fn resume(&mut self) {
        self.at_rest = None;
        self.clients.set_resting(None, &mut self.ring);
        self.files.set_resting(false, &mut self.ring);
        self.vhost_user.set_resting(false);
    }

    /// Answers the quiesce call when no request is unanswered any more.
    pub(super) fn check_rest(&mut self) {
        if self.at_rest.is_some()
            && self.clients.are_at_rest()
            && self.files.are_at_rest()
            && self.vhost_user.are_at_rest()
        {
            let _ = self.at_rest.take().expect("just looked at").send(Ok(()));
        }
    }

    /// Hands over the quiesced connections.
    pub(super) fn hand_over(&mut self) -> AtRest {
        AtRest {
            clients: self.clients.hand_over(&mut self.ring),
            files: self.files.hand_over(&mut self.ring),
        }
    }
}
