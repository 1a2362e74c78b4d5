//! The list of what is cached here, hottest first, for the other host.
//!
//! It goes page by page; the other host says which page it wants next, and how many ranges it has not pulled yet, so that neither
//! holds much of it. Where that begins anew, so does the list.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hob_control::peer::{Peer, PeerError, call_path};
use hob_control::{CallAnswer, CarryMode};
use hob_engine::migration::{Session, heat};
use hob_engine::units::SECTOR_BYTES;

use super::source::Leaving;

/// Blocks that are looked up at once.
const BLOCKS_AT_ONCE: usize = 1024;

/// Ranges that wait at the other host, at most.
const RANGES_MAX: u64 = 1 << 19;

/// Waiting for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Pause after what went wrong, and before the next look at one who has enough.
const PAUSE: Duration = Duration::from_millis(300);

/// Sends the list whenever it is wanted, until dropped.
pub(super) async fn send(leaving: Arc<Leaving>, session: Session) {
    if leaving.plan.cache == CarryMode::Drop {
        return;
    }
    let mut peer = leaving.peer();
    loop {
        leaving.shared.list_wanted.notified().await;
        if let Err(error) = send_all(&leaving, session, &mut peer).await {
            tracing::debug!("{}: the list was not sent: {error}", leaving.name);
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// A page at a time; ends early where the other host wants another one than comes next.
async fn send_all(leaving: &Leaving, session: Session, peer: &mut Peer) -> Result<(), PeerError> {
    let lost = |error: &dyn std::fmt::Display| PeerError::Lost(error.to_string());
    let (shard, id) = leaving.manager.shard_of(&leaving.name).map_err(|error| lost(&error))?;
    let blocks = shard.hottest(id).await.map_err(|error| lost(&error))?;
    let mut page = Page { leaving, session, number: 0, valid: 0 };
    for some in blocks.chunks(BLOCKS_AT_ONCE) {
        let extents = shard.extents(id, some.to_vec()).await.map_err(|error| lost(&error))?;
        for ranges in extents.chunks(heat::RANGES_MAX) {
            if !page.send(peer, ranges, false).await? {
                return Ok(());
            }
        }
    }
    page.send(peer, &[], true).await?;
    let mut facts = leaving.shared.facts();
    facts.valid = facts.valid.max(page.valid);
    Ok(())
}

struct Page<'a> {
    leaving: &'a Leaving,
    session: Session,
    number: u32,
    valid: u64,
}

impl Page<'_> {
    /// False if another page is wanted than the one after this.
    async fn send(
        &mut self,
        peer: &mut Peer,
        ranges: &[(u64, u64)],
        is_last: bool,
    ) -> Result<bool, PeerError> {
        let session = self.leaving.session(self.session);
        let more = format!("&page={}&last={is_last}", self.number);
        let path = call_path(&self.leaving.name, "list", &session, &more);
        let body = heat::encode(ranges);
        self.leaving.bandwidth.take(body.len()).await;
        self.leaving.shared.sent.fetch_add(body.len() as u64, Ordering::Relaxed);
        let mut answer = peer.call(&path, body, ANSWER_MAX).await?;
        while answer.refused.is_none() && answer.ranges > RANGES_MAX {
            tokio::time::sleep(PAUSE).await;
            answer = look(self.leaving, self.session, peer).await?;
        }
        self.number += 1;
        self.valid += ranges.iter().map(|(first, end)| (end - first) * SECTOR_BYTES).sum::<u64>();
        Ok(answer.refused.is_none() && (is_last || answer.page == Some(self.number)))
    }
}

async fn look(leaving: &Leaving, session: Session, peer: &mut Peer) -> Result<CallAnswer, PeerError> {
    let path = call_path(&leaving.name, "look", &leaving.session(session), "");
    peer.call(&path, Vec::new(), ANSWER_MAX).await
}
