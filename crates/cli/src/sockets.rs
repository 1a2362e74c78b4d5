//! `--socket-owner`, `--socket-group`, `--socket-mode`: owner and permissions of the Unix sockets
//! of disks.

use clap::Args;
use hob_daemon::SocketSettings;

/// Options that `hob serve` and `hob daemon` share.
#[derive(Clone, Debug, Args)]
pub(super) struct Sockets {
    /// Give the Unix sockets of disks (NBD and vhost-user) to this user, by name or number
    #[arg(long, value_name = "USER")]
    socket_owner: Option<String>,
    /// Give the Unix sockets of disks to this group, by name or number
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
    /// Give the Unix sockets of disks these permission bits, octal; clients need write permission
    #[arg(long, value_name = "MODE")]
    socket_mode: Option<String>,
}

impl From<Sockets> for SocketSettings {
    fn from(sockets: Sockets) -> SocketSettings {
        let Sockets { socket_owner: owner, socket_group: group, socket_mode: mode } = sockets;
        SocketSettings { owner, group, mode }
    }
}
