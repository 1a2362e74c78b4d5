//! Connections over socket pairs and a real ring, without a disk: the tested requests never reach
//! an engine.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use hob_engine::Limits;
use hob_engine::units::DatastoreId;
use hob_frontends::Payload;
use hob_nbd::{Command, CommandFlags, ExportInfo};
use hob_storage::ring::RingConfig;
use tokio::sync::Semaphore;

use super::*;
use crate::shard_loop::gate::{RESERVE_SHARE, SMALL_BYTES_MAX};

const NOW: Instant = Instant(1);

/// Size of the arena in bytes: less than three large writes.
const ARENA_BYTES: usize = 4 << 20;

/// Length of a large write in bytes. The write is longer than a small buffer, and the arena has no
/// room for two of them.
const LARGE_BYTES: u32 = 2 << 20;

struct Rig {
    clients: Clients,
    ring: Ring,
    engine: Engine,
    permits: Arc<Semaphore>,
}

impl Rig {
    fn new() -> Rig {
        let config = RingConfig { arena_bytes: ARENA_BYTES, ..RingConfig::default() };
        let mut ring = Ring::new(&config).expect("a ring");
        (0..2).for_each(|disk| ring.arena_mut().join(DiskId(disk), DatastoreId(disk as u16)));
        Rig {
            clients: Clients::default(),
            ring,
            engine: Engine::new(Limits::default()),
            permits: Arc::new(Semaphore::new(8)),
        }
    }

    /// Returns the client's end of a connection to a disk.
    fn connect(&mut self, disk: DiskId) -> UnixStream {
        let (socket, client) = UnixStream::pair().expect("a socket pair");
        client.set_read_timeout(Some(Duration::from_secs(60))).expect("a time limit");
        let negotiated = Negotiated {
            export: String::new(),
            info: ExportInfo::new(1 << 30),
            structured_replies: true,
            base_allocation: true,
            contexts: vec![],
        };
        let attachment = ClientAttachment {
            socket: socket.into(),
            promote: Promote::Usual,
            transport: Transport::Direct,
            permit: Arc::new(self.permits.clone().try_acquire_owned().expect("a place")),
            kind: ClientKind::Guest,
        };
        self.clients.attach(NOW, &mut self.ring, disk, attachment, negotiated, &[]);
        client
    }

    /// Runs the loop until a condition is true.
    #[track_caller]
    fn until(&mut self, what: &str, is_so: impl Fn(&Clients) -> bool) {
        for _ in 0..1000 {
            while let Some(completion) = self.ring.next_completion() {
                self.clients.handle_completion(NOW, completion, &mut self.ring);
            }
            while self.clients.pump(NOW, &mut self.ring, &mut self.engine, true) {}
            if is_so(&self.clients) {
                return;
            }
            let patience = Some(Duration::from_millis(100));
            self.ring.submit_and_wait(Duration::ZERO, patience).expect("the ring waits");
        }
        panic!("never: {what}");
    }
}

fn header(command: Command, length: u32) -> [u8; REQUEST_BYTES] {
    hob_nbd::Request { command, flags: CommandFlags::NONE, cookie: 1, offset: 0, length }.encode()
}

#[test]
fn the_process_of_a_client_is_known() {
    let mut rig = Rig::new();
    let _clients = [0, 1, 1].map(|disk| rig.connect(DiskId(disk)));
    let own = std::process::id();
    assert_eq!(rig.clients.pids(DiskId(0)), [own]);
    assert_eq!(rig.clients.pids(DiskId(1)), [own, own]);
    assert!(rig.clients.pids(DiskId(2)).is_empty());
}

/// Returns a client with a buffer, and two clients that wait for one.
fn crowd(rig: &mut Rig) -> [UnixStream; 3] {
    let mut streams = [0, 1, 1].map(|disk| rig.connect(DiskId(disk)));
    for (stream, waiting) in streams.iter_mut().zip(0..) {
        stream.write_all(&header(Command::Write, LARGE_BYTES)).expect("room for a header");
        rig.until("a header is looked at", |clients| match waiting {
            0 => clients.clients[0].as_ref().is_some_and(|client| client.receiving_payload),
            _ => clients.waiting.len() == waiting,
        });
    }
    streams
}

#[test]
fn buffers_of_a_disconnected_client_go_to_waiting_clients() {
    let mut rig = Rig::new();
    let [leaves, _second, _third] = crowd(&mut rig);
    drop(leaves);
    rig.until("the second one has its buffer", |clients| {
        clients.clients[1].as_ref().is_some_and(|client| client.receiving_payload)
    });
}

#[test]
fn buffers_of_a_removed_client_go_to_waiting_clients() {
    let mut rig = Rig::new();
    let _streams = crowd(&mut rig);
    let sent_away = |connection: &Connection| connection.disk() == DiskId(0);
    rig.clients.close("the disk goes", &mut rig.ring, sent_away);
    rig.until("the second one has its buffer", |clients| {
        clients.clients[1].as_ref().is_some_and(|client| client.receiving_payload)
    });
}

/// The idle time of a client also counts while no other client waits for buffers. Clients therefore
/// wait only briefly for the buffers of a client that has been idle for long.
#[test]
fn an_idle_client_is_disconnected_soon_after_others_begin_to_wait() {
    let is_closed =
        |rig: &Rig| rig.clients.clients[0].as_ref().is_none_or(|client: &Client| client.shut_down);
    for idle_ns in [2 * HOARDING_NS_MAX, 0] {
        let mut rig = Rig::new();
        let _streams = crowd(&mut rig);
        let now = NOW + 2 * HOARDING_NS_MAX;
        rig.clients.client_mut(0).last_progress = Instant(now.0 - idle_ns);
        rig.clients.waiting_since = now;
        rig.clients.handle_timeout(now + (WAITING_NS_MAX - 1), &mut rig.ring);
        assert!(!is_closed(&rig), "the others have waited too briefly");
        assert_eq!(rig.clients.poll_timeout(), Some(now + WAITING_NS_MAX));
        rig.clients.handle_timeout(now + WAITING_NS_MAX, &mut rig.ring);
        assert_eq!(is_closed(&rig), idle_ns > 0, "{idle_ns}");
        rig.clients.handle_timeout(now + HOARDING_NS_MAX, &mut rig.ring);
        assert!(is_closed(&rig));
        rig.until("the second one has its buffer", |clients| {
            clients.clients[1].as_ref().is_some_and(|client| client.receiving_payload)
        });
    }
}

/// Promise 4: buffers that a disk does not return leave buffers for other disks, however many
/// clients of this disk wait for buffers.
#[test]
fn a_disk_without_room_keeps_no_other_waiting() {
    let mut rig = Rig::new();
    let mut streams: Vec<UnixStream> = (0..7).map(|_| rig.connect(DiskId(0))).collect();
    for stream in &mut streams {
        stream.write_all(&header(Command::Write, 1 << 20)).expect("room for a header");
    }
    let held_up = |clients: &Clients| clients.held_up.get(&DiskId(0)).map_or(0, |it| it.without_buffer.len());
    rig.until("most are held up", |clients| held_up(clients) >= 4);
    assert!(rig.clients.waiting.is_empty(), "they are in nobody's way");
    let mut other = rig.connect(DiskId(1));
    other.write_all(&header(Command::Write, 256 << 10)).expect("room for a header");
    rig.until("another disk's client has its buffer", |clients| {
        clients.clients[7].as_ref().is_some_and(|client| client.receiving_payload)
    });
    let before = held_up(&rig.clients);
    drop(streams.remove(0));
    rig.until("what it held goes to another one", |clients| held_up(clients) < before);
}

/// A client may wait for the reply to its last command before it sends anything else.
#[test]
fn a_command_that_came_while_answers_waited_is_not_forgotten() {
    let mut rig = Rig::new();
    let mut stream = rig.connect(DiskId(0));
    stream.write_all(&header(Command::BlockStatus, 1 << 27).repeat(2)).expect("room for headers");
    rig.until("two questions", |clients| clients.queries.len() == 2);
    let extents = vec![Extent { length: 512, state: 0 }; 1 << 18];
    // The first reply is larger than the socket accepts; the second fills the connection's list.
    while let Some((_, query)) = rig.clients.poll_status() {
        rig.clients.handle_status(query.id.0, Ok(&extents), &rig.engine);
        rig.until("the first one is being sent", |clients| {
            clients.clients[0].as_ref().is_some_and(|it| it.sending)
        });
    }
    stream.write_all(&header(Command::Trim, 0)).expect("room for a header");
    rig.until("it is received", |clients| {
        let rx = clients.clients[0].as_ref().and_then(|client| client.rx.as_ref());
        rx.is_some_and(|rx| rx.filled().len() == REQUEST_BYTES)
    });
    let answers = 2 * (20 + 4 + 8 * extents.len());
    let reader = std::thread::spawn(move || {
        let mut bytes = vec![0; answers + 16];
        stream.read_exact(&mut bytes).map(|()| bytes.split_off(answers))
    });
    rig.until("everything is read", |_| reader.is_finished());
    let refused = reader.join().expect("a reader").expect("an answer to the last one");
    assert_eq!(refused[4..8], 22u32.to_be_bytes(), "it made no sense");
}

/// A connection gets a buffer if enough buffers remain for others: of the disk's share, of the
/// arena, and for a waiting large request.
#[test]
fn a_connection_gets_a_buffer_only_if_enough_remain() {
    let mut rig = Rig::new();
    let (disk, small) = (DiskId(0), SMALL_BYTES_MAX);
    let share = rig.ring.arena_mut().room(disk);
    assert!(share > 2 * small && share < ARENA_BYTES, "{share}");
    let has_room = |rig: &mut Rig, held: usize, open: bool, len: usize| {
        let mut gate = Gate::new(&mut rig.ring, disk, held, open);
        (gate.has_room(len), gate.lacking(), gate.greedy)
    };
    assert_eq!(has_room(&mut rig, 0, true, small), (true, None, false));
    assert_eq!(has_room(&mut rig, 0, true, share), (true, None, false), "it is the first of its disk");
    assert_eq!(has_room(&mut rig, 0, true, share + 4096), (false, Some(share + 4096), false), "too much");
    assert_eq!(
        has_room(&mut rig, 0, false, small + 4096),
        (false, None, false),
        "others wait for large ones"
    );
    assert_eq!(has_room(&mut rig, 0, false, small), (true, None, false), "small ones do not queue");
    assert_eq!(has_room(&mut rig, small, true, share), (false, None, true), "it has its part already");
    assert!(!Gate::ungated(&mut rig.ring).has_room(1), "only for giving back");
    // If the disk already has buffers, large buffers must leave a sixteenth of its share.
    let held = rig.ring.arena_mut().alloc_for(disk, 4096).expect("room");
    let (room, reserve) = (rig.ring.arena_mut().room(disk), share / RESERVE_SHARE);
    assert_eq!(has_room(&mut rig, 0, true, room), (false, Some(room + reserve), false));
    assert_eq!(has_room(&mut rig, 0, true, room - reserve), (true, None, false));
    rig.ring.arena_mut().free(held);
}
