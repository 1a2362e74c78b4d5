//! The list of cached data, hottest first, which the source sends to the destination.
//!
//! The list is sent in pages. The destination asks for each page and reports how many ranges it has
//! not pulled yet, so that neither host stores a long list. When the destination asks for the first
//! page again, the source makes the list again.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hob_control::peer::{Peer, PeerError, call_path};
use hob_control::{CallAnswer, CarryMode};
use hob_engine::migration::{Session, heat};
use hob_engine::units::SECTOR_BYTES;

use super::source::Leaving;

/// Number of cached blocks whose valid sectors are looked up in one call to the shard.
const BLOCKS_AT_ONCE: usize = 1024;

/// Maximum number of ranges that the destination has received and not pulled yet.
const RANGES_MAX: u64 = 1 << 19;

/// Maximum time for the destination to answer.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Pause after a failure, and while the destination has `RANGES_MAX` ranges to pull.
const PAUSE: Duration = Duration::from_millis(300);

/// Sends the list of cached data whenever the destination requests it, until the future is dropped.
pub(super) async fn send(leaving: Arc<Leaving>, session: Session) {
    if leaving.plan.cache == CarryMode::Drop {
        return;
    }
    let mut peer = leaving.peer();
    loop {
        leaving.shared.list_wanted.notified().await;
        if let Err(error) = send_all(&leaving, session, &mut peer).await {
            tracing::debug!("disk {}: cannot send the list of cached data: {error}", leaving.name);
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Sends the list page by page. Ends early if the destination requests a page that is not the next
/// one.
async fn send_all(leaving: &Leaving, session: Session, peer: &mut Peer) -> Result<(), PeerError> {
    let lost = |error: &dyn std::fmt::Display| PeerError::Lost(error.to_string());
    let (shard, id) = leaving.migrations.registry.shard_of(&leaving.name).map_err(|error| lost(&error))?;
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
    /// Sends a page. Returns false if the destination then requests a page that is not the next
    /// one.
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
