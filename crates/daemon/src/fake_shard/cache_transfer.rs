//! Calls to the fake shard about a migrating disk ([`TransferCall`]). The real engine executes the
//! calls that concern the engine, such as roles, flushes and changed regions. No cached data is
//! pulled, and no other host is contacted.

use hob_engine::command::{Command, Role};
use hob_engine::io::{IoError, Op};
use hob_engine::units::{DiskId, SessionId};

use super::{State, Waiting};
use crate::shard_api::{Answer, Progress, ShardError, TransferCall};

/// Number of bytes that the fake shard invalidates when a call asks it to invalidate ranges or the
/// whole disk.
const FORGOTTEN: u64 = 4096;

impl State {
    pub(super) fn transfer(&mut self, id: DiskId, call: TransferCall) {
        match call {
            TransferCall::Own(role, answer) => self.command(id, Command::Own(role), Waiting::Add(answer)),
            TransferCall::TakeOver(answer) => {
                self.command(id, Command::Own(Role::Here), Waiting::Add(answer))
            }
            TransferCall::Watch(watch, answer) => {
                self.command(id, Command::Watch(watch), Waiting::Add(answer));
            }
            TransferCall::TakeChanged(answer) => {
                let _ = answer.send(Ok(self.engine.take_changed(id).map(Box::new)));
            }
            TransferCall::Hottest(answer) => drop(answer.send(Ok(self.engine.hottest_blocks(id)))),
            TransferCall::Extents(blocks, answer) => {
                let _ = answer.send(Ok(self.engine.valid_extents(id, &blocks)));
            }
            TransferCall::Progress(answer) => drop(answer.send(Ok(Progress::default()))),
            TransferCall::Listed(_, answer) => drop(answer.send(Ok(()))),
            TransferCall::Flush(op, answer) => self.own(id, op, 0, answer),
            TransferCall::Forget(_, answer) | TransferCall::Restart(answer) => {
                self.own(id, Op::Forget, FORGOTTEN, answer);
            }
            TransferCall::Pull
            | TransferCall::SetPeer(_)
            | TransferCall::LeavePeer
            | TransferCall::AttachPeer(_) => {}
        }
    }

    /// Sends a request to the engine that comes from the daemon, not from a guest.
    fn own(&mut self, id: DiskId, op: Op, len: u64, answer: Answer<()>) {
        let request = self.begin_in(SessionId::DAEMON_BIT, id, op, 0, len);
        let result = self.replies.remove(&request).unwrap_or(Err(IoError::Failed));
        let failed = |error| ShardError::Unusable(format!("the engine refused the request with {error:?}"));
        let _ = answer.send(result.map_err(failed));
    }
}
