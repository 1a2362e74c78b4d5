//! Messages to the kernel's NBD driver by generic netlink, as `linux/nbd-netlink.h`,
//! `linux/genetlink.h` and `linux/netlink.h` define them.
//!
//! The kernel executes a request inside the call that sends the request. So the answer is readable
//! when this call returns, and no function here waits for an answer. All numbers are in the host's
//! byte order. Answers come from the kernel, but are validated like other external bytes.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

/// Maximum length of one answer in bytes.
const ANSWER_BYTES_MAX: usize = 16 << 10;

/// Maximum number of answers to one request.
const ANSWERS_MAX: usize = 16;

/// Length of a netlink header.
const HEADER_BYTES: usize = 16;
/// Length of a generic netlink header.
const GENERIC_BYTES: usize = 4;
/// Length of an attribute's header.
const ATTRIBUTE_BYTES: usize = 4;

/// Message type of the control family, which returns the numbers of all other families.
const CONTROL_FAMILY: u16 = 0x10;
/// Request to the control family for the number of a family.
const CONTROL_GET_FAMILY: u8 = 3;
const CONTROL_FAMILY_ID: u16 = 1;
const CONTROL_FAMILY_NAME: u16 = 2;

/// Message type of an error, or of an acknowledgement, which is the error 0.
const ERROR: u16 = 2;
const FLAG_REQUEST: u16 = 1;
const FLAG_ACKNOWLEDGE: u16 = 4;
/// Flag of an attribute whose value is a list of attributes.
const NESTED: u16 = 0x8000;

/// Name of the driver's family.
const FAMILY: &str = "nbd";
/// Version of the driver's family.
const VERSION: u8 = 1;

const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;
const RECONFIGURE: u8 = 3;

const INDEX: u16 = 1;
const SIZE_BYTES: u16 = 2;
const BLOCK_SIZE_BYTES: u16 = 3;
const TIMEOUT: u16 = 4;
const SERVER_FLAGS: u16 = 5;
const SOCKETS: u16 = 7;
const DEAD_CONN_TIMEOUT: u16 = 8;
const BACKEND_IDENTIFIER: u16 = 10;
const SOCKET_ITEM: u16 = 1;
const SOCKET_FD: u16 = 1;

/// Settings of a new device.
#[derive(Debug)]
pub(super) struct NewDevice<'a> {
    /// Size in bytes.
    pub(super) size_bytes: u64,
    /// Logical and physical block size in bytes.
    pub(super) block_bytes: u32,
    /// Transmission flags of the NBD protocol.
    pub(super) flags: u16,
    /// Time that requests wait for a new connection after the connection was lost, in seconds.
    pub(super) dead_seconds: u64,
    /// Identifier of the device, which a later process finds in sysfs.
    pub(super) identifier: &'a str,
}

/// A generic netlink socket to the kernel's NBD driver.
#[derive(Debug)]
pub(super) struct Driver {
    socket: OwnedFd,
    family: u16,
    sequence: u32,
}

impl Driver {
    /// Finds the driver. The kernel loads the module `nbd` for this request if it can.
    ///
    /// # Errors
    /// Returns `NotFound` if the kernel has no NBD driver, or another error of the system.
    pub(super) fn open() -> io::Result<Driver> {
        let socket = socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(netlink::GENERIC),
        )?;
        let mut driver = Driver { socket, family: CONTROL_FAMILY, sequence: 0 };
        let mut request = Message::new(CONTROL_FAMILY, CONTROL_GET_FAMILY, 1);
        request.text(CONTROL_FAMILY_NAME, FAMILY);
        let answer = driver.ask(request)?;
        let id = answer.iter().find(|(kind, _)| *kind == CONTROL_FAMILY_ID);
        let id = id.and_then(|(_, value)| Some(u16::from_ne_bytes(value.get(..2)?.try_into().ok()?)));
        driver.family = id.ok_or_else(|| invalid("the answer has no family number"))?;
        Ok(driver)
    }

    /// Creates a device over a connection. Returns its number N, of /dev/nbdN.
    pub(super) fn connect(&mut self, new: &NewDevice<'_>, socket: BorrowedFd<'_>) -> io::Result<u32> {
        let answer = self.ask(connect(self.family, new, socket.as_raw_fd()))?;
        let index = answer.iter().find(|(kind, _)| *kind == INDEX);
        let index = index.and_then(|(_, value)| Some(u32::from_ne_bytes(value.get(..4)?.try_into().ok()?)));
        index.ok_or_else(|| invalid("the answer has no device number"))
    }

    /// Gives a device a connection in place of a lost one. Without a lost connection, the kernel
    /// closes the socket and reports success.
    pub(super) fn reconnect(
        &mut self,
        index: u32,
        identifier: &str,
        socket: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let mut request = reconfigure(self.family, index, identifier);
        request.sockets(socket.as_raw_fd());
        self.ask(request).map(drop)
    }

    /// Changes a device's size. The kernel may wait for requests in flight, so the device must be
    /// served.
    pub(super) fn resize(&mut self, index: u32, identifier: &str, size_bytes: u64) -> io::Result<()> {
        let mut request = reconfigure(self.family, index, identifier);
        request.number(SIZE_BYTES, size_bytes);
        self.ask(request).map(drop)
    }

    /// Disconnects a device. Requests in flight fail.
    pub(super) fn disconnect(&mut self, index: u32) -> io::Result<()> {
        self.ask(disconnect(self.family, index)).map(drop)
    }

    /// Sends a request. Returns the attributes of the answer.
    fn ask(&mut self, request: Message) -> io::Result<Vec<(u16, Vec<u8>)>> {
        self.sequence += 1;
        send(&self.socket, &request.finish(self.sequence), SendFlags::empty())?;
        let mut attributes = Vec::new();
        let mut buffer = vec![0; ANSWER_BYTES_MAX];
        for _ in 0..ANSWERS_MAX {
            let (_, length) = recv(&self.socket, &mut buffer[..], RecvFlags::DONTWAIT | RecvFlags::TRUNC)?;
            let bytes = buffer.get(..length).ok_or_else(|| invalid("an answer is too long"))?;
            if parse(bytes, self.sequence, &mut attributes)? {
                return Ok(attributes);
            }
        }
        Err(invalid("too many answers"))
    }
}

fn connect(family: u16, new: &NewDevice<'_>, socket: i32) -> Message {
    let mut request = Message::new(family, CONNECT, VERSION);
    request.number(SIZE_BYTES, new.size_bytes);
    request.number(BLOCK_SIZE_BYTES, u64::from(new.block_bytes));
    // Without a timeout the kernel never closes a connection because a request takes long.
    request.number(TIMEOUT, 0);
    request.number(SERVER_FLAGS, u64::from(new.flags));
    request.number(DEAD_CONN_TIMEOUT, new.dead_seconds);
    request.sockets(socket);
    request.text(BACKEND_IDENTIFIER, new.identifier);
    request
}

fn reconfigure(family: u16, index: u32, identifier: &str) -> Message {
    let mut request = Message::new(family, RECONFIGURE, VERSION);
    request.attribute(INDEX, &index.to_ne_bytes());
    request.text(BACKEND_IDENTIFIER, identifier);
    request
}

fn disconnect(family: u16, index: u32) -> Message {
    let mut request = Message::new(family, DISCONNECT, VERSION);
    request.attribute(INDEX, &index.to_ne_bytes());
    request
}

/// A netlink request that is being built.
#[derive(Debug)]
struct Message(Vec<u8>);

impl Message {
    fn new(family: u16, command: u8, version: u8) -> Message {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[4..6].copy_from_slice(&family.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(FLAG_REQUEST | FLAG_ACKNOWLEDGE).to_ne_bytes());
        bytes.extend([command, version, 0, 0]);
        Message(bytes)
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) {
        let length = u16::try_from(ATTRIBUTE_BYTES + value.len()).expect("values are short");
        self.0.extend(length.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn number(&mut self, kind: u16, value: u64) {
        self.attribute(kind, &value.to_ne_bytes());
    }

    fn text(&mut self, kind: u16, text: &str) {
        self.attribute(kind, &[text.as_bytes(), b"\0"].concat());
    }

    /// Adds an attribute that contains a list of one socket.
    fn sockets(&mut self, socket: i32) {
        let mut inner = Message(Vec::new());
        inner.attribute(SOCKET_FD, &socket.to_ne_bytes());
        let mut item = Message(Vec::new());
        item.attribute(SOCKET_ITEM | NESTED, &inner.0);
        self.attribute(SOCKETS | NESTED, &item.0);
    }

    fn finish(mut self, sequence: u32) -> Vec<u8> {
        let length = u32::try_from(self.0.len()).expect("requests are short");
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        self.0[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.0
    }
}

/// Adds the attributes of the answers in a datagram to `attributes`. Returns true if the datagram
/// contains the acknowledgement.
fn parse(mut bytes: &[u8], sequence: u32, attributes: &mut Vec<(u16, Vec<u8>)>) -> io::Result<bool> {
    while bytes.len() >= HEADER_BYTES {
        let number = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let (length, kind) = (number(0) as usize, u16::from_ne_bytes([bytes[4], bytes[5]]));
        if length < HEADER_BYTES || length > bytes.len() {
            return Err(invalid("the length of an answer is wrong"));
        }
        let (body, is_ours) = (&bytes[HEADER_BYTES..length], number(8) == sequence);
        if is_ours && kind == ERROR {
            let code = body.get(..4).ok_or_else(|| invalid("an error has no number"))?;
            return match i32::from_ne_bytes(code.try_into().expect("four bytes")) {
                0 => Ok(true),
                code => Err(io::Error::from_raw_os_error(code.saturating_neg())),
            };
        }
        if is_ours {
            attributes.extend(attributes_of(body.get(GENERIC_BYTES..).unwrap_or_default())?);
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

fn attributes_of(mut bytes: &[u8]) -> io::Result<Vec<(u16, Vec<u8>)>> {
    let mut found = Vec::new();
    while bytes.len() >= ATTRIBUTE_BYTES {
        let length = usize::from(u16::from_ne_bytes([bytes[0], bytes[1]]));
        let kind = u16::from_ne_bytes([bytes[2], bytes[3]]) & !NESTED;
        let value = bytes
            .get(ATTRIBUTE_BYTES..length)
            .ok_or_else(|| invalid("the length of an attribute is wrong"))?;
        found.push((kind, value.to_vec()));
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(found)
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the kernel's netlink answer is invalid: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes of one attribute.
    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = ((value.len() + 4) as u16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().div_ceil(4) * 4, 0);
        bytes
    }

    fn message(kind: u16, flags: u16, sequence: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = ((body.len() + 16) as u32).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend(0u32.to_ne_bytes());
        bytes.extend(body);
        bytes
    }

    #[test]
    fn a_connect_request_has_the_layout_of_nbd_netlink_h() {
        let new = NewDevice {
            size_bytes: 1 << 30,
            block_bytes: 512,
            flags: 0x6d,
            dead_seconds: 600,
            identifier: "hob:web",
        };
        let socket = attribute(7 | 0x8000, &attribute(1 | 0x8000, &attribute(1, &9u32.to_ne_bytes())));
        let body = [
            vec![1, 1, 0, 0],
            attribute(2, &(1u64 << 30).to_ne_bytes()),
            attribute(3, &512u64.to_ne_bytes()),
            attribute(4, &0u64.to_ne_bytes()),
            attribute(5, &0x6du64.to_ne_bytes()),
            attribute(8, &600u64.to_ne_bytes()),
            socket,
            attribute(10, b"hob:web\0"),
        ]
        .concat();
        assert_eq!(connect(0x1d, &new, 9).finish(3), message(0x1d, 5, 3, &body));
    }

    #[test]
    fn requests_for_a_known_device_name_its_number_and_identifier() {
        let body = [vec![3, 1, 0, 0], attribute(1, &4u32.to_ne_bytes()), attribute(10, b"hob:a\0")].concat();
        assert_eq!(reconfigure(0x1d, 4, "hob:a").finish(1), message(0x1d, 5, 1, &body));
        let body = [vec![2, 1, 0, 0], attribute(1, &4u32.to_ne_bytes())].concat();
        assert_eq!(disconnect(0x1d, 4).finish(2), message(0x1d, 5, 2, &body));
    }

    #[test]
    fn an_answer_has_attributes_and_then_an_acknowledgement() {
        let answer = message(0x1d, 0, 7, &[vec![1, 1, 0, 0], attribute(1, &11u32.to_ne_bytes())].concat());
        let mut found = Vec::new();
        assert!(!parse(&answer, 7, &mut found).unwrap());
        assert_eq!(found, [(1, 11u32.to_ne_bytes().to_vec())]);
        let other = message(ERROR, 0, 6, &(-22i32).to_ne_bytes());
        assert!(!parse(&other, 7, &mut found).unwrap(), "it answers another request");
        assert!(parse(&message(ERROR, 0, 7, &0i32.to_ne_bytes()), 7, &mut found).unwrap());
        let both = [answer, message(ERROR, 0, 7, &0i32.to_ne_bytes())].concat();
        let mut found = Vec::new();
        assert!(parse(&both, 7, &mut found).unwrap());
        assert_eq!(found.len(), 1);
    }

    #[test]
    fn an_error_is_the_systems_error() {
        let error = parse(&message(ERROR, 0, 1, &(-2i32).to_ne_bytes()), 1, &mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        for code in [i32::MIN, i32::MAX, -4096] {
            assert!(parse(&message(ERROR, 0, 1, &code.to_ne_bytes()), 1, &mut Vec::new()).is_err());
        }
    }

    #[test]
    fn netlink_answers_from_anywhere_never_panic() {
        let whole = message(0x1d, 0, 7, &[vec![1, 1, 0, 0], attribute(1, &11u32.to_ne_bytes())].concat());
        let mut state = 0x9E37_79B9_7F4A_7C15u64;
        for _ in 0..20_000 {
            let mut bytes = whole.clone();
            for _ in 0..3 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let at = state as usize % bytes.len();
                bytes[at] = (state >> 32) as u8;
            }
            bytes.truncate((state >> 40) as usize % (bytes.len() + 1));
            let _ = parse(&bytes, 7, &mut Vec::new());
        }
    }

    /// If the kernel of this host has no NBD driver, the error says so.
    #[test]
    fn the_driver_is_found_or_missing() {
        if let Err(error) = Driver::open() {
            assert_eq!(error.kind(), io::ErrorKind::NotFound, "{error}");
        }
    }
}
