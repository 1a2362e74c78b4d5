//! Disks that move, without what moves: nothing is pulled, and no other host is asked.

use hob_engine::command::{Command, Role};
use hob_engine::io::{IoError, Op};
use hob_engine::units::{DiskId, SessionId};

use super::{State, Waiting};
use crate::daemon::shard::{CarryCall, Progress};
use crate::daemon::shard_api::{Answer, ShardError};

/// What is forgotten stands for all of a disk, bytes.
const FORGOTTEN: u64 = 4096;

impl State {
    pub(super) fn carry(&mut self, id: DiskId, call: CarryCall) {
        match call {
            CarryCall::Own(role, answer) => self.command(id, Command::Own(role), Waiting::Add(answer)),
            CarryCall::TakeOver(answer) => self.command(id, Command::Own(Role::Here), Waiting::Add(answer)),
            CarryCall::Watch(watch, answer) => {
                self.command(id, Command::Watch(watch), Waiting::Add(answer));
            }
            CarryCall::TakeChanged(answer) => {
                let _ = answer.send(Ok(self.engine.take_changed(id).map(Box::new)));
            }
            CarryCall::Hottest(answer) => drop(answer.send(Ok(self.engine.hottest_blocks(id)))),
            CarryCall::Extents(blocks, answer) => {
                let _ = answer.send(Ok(self.engine.valid_extents(id, &blocks)));
            }
            CarryCall::Progress(answer) => drop(answer.send(Ok(Progress::default()))),
            CarryCall::Listed(_, answer) => drop(answer.send(Ok(()))),
            CarryCall::Flush(op, answer) => self.own(id, op, 0, answer),
            CarryCall::Forget(_, answer) | CarryCall::Restart(answer) => {
                self.own(id, Op::Forget, FORGOTTEN, answer);
            }
            CarryCall::Pull | CarryCall::SetPeer(_) | CarryCall::LeavePeer | CarryCall::AttachPeer(_) => {}
        }
    }

    /// A request of the daemon's own.
    fn own(&mut self, id: DiskId, op: Op, len: u64, answer: Answer<()>) {
        let request = self.begin_in(SessionId::DAEMON_BIT, id, op, 0, len);
        let result = self.replies.remove(&request).unwrap_or(Err(IoError::Failed));
        let failed = |error| ShardError::Unusable(format!("the disk says {error:?}"));
        let _ = answer.send(result.map_err(failed));
    }
}
