//! The process at the other end of a Unix socket.
//!
//! `unsafe` because `rustix` returns the process id in a type without 0, and the kernel reports 0 for
//! a process of another namespace.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};

/// Returns the id of the process that connected to a Unix socket, in the namespace of this process.
/// Returns `None` for other sockets, and for a process outside this namespace. Does not block.
pub fn peer_process(socket: impl AsFd) -> Option<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `bytes` bytes to `peer`, which is valid with any content.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut bytes,
        )
    };
    u32::try_from(peer.pid).ok().filter(|pid| result == 0 && *pid > 0)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn only_a_unix_socket_has_a_known_process() {
        let (near, _far) = UnixStream::pair().unwrap();
        assert_eq!(peer_process(&near), Some(std::process::id()));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert_eq!(peer_process(&stream), None);
    }
}
