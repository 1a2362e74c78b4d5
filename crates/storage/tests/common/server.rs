//! An NBD server in this process that can simulate faults.
#![allow(dead_code, unreachable_pub)]

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hob_nbd::server::handshake::{
    BASE_ALLOCATION_ID, Handshake, HandshakeLimits, HandshakeOutcome, Negotiated,
};
use hob_nbd::server::reply::{self, Position};
use hob_nbd::server::request::decode_request;
use hob_nbd::{Command, CommandFlags, ErrorCode, ExportDirectory, ExportInfo, Extent};

/// The server's next actions, and its observations.
#[derive(Debug)]
pub struct Script {
    pub export: ExportInfo,
    pub data: Vec<u8>,
    /// Number of requests to answer before the connection is closed; the next request is read and
    /// not answered. The next connection is served without limit.
    pub answers_left: Option<usize>,
    /// True if new connections are closed at once.
    pub refuse: bool,
    /// True if requests are answered with NBD_ESHUTDOWN until the client disconnects.
    pub shuts_down: bool,
    /// Number of requests that are answered with NBD_ESHUTDOWN next.
    pub shutdown_replies: usize,
    /// Number of connections that the client ended with NBD_CMD_DISC.
    pub disconnects: usize,
    /// True if requests are read and never answered.
    pub silent: bool,
    /// True if writes fail.
    pub sick: bool,
    /// True if flushes fail.
    pub flush_fails: bool,
    /// The server answers no flush until it has received as many flushes as this list has entries.
    /// Then it answers them in the order of the list. An entry has the number of a flush, and true
    /// for success.
    pub flush_answers: Vec<(usize, bool)>,
    /// Cookies of the flushes that wait for `flush_answers`.
    withheld: Vec<u64>,
    /// Bytes that are sent instead of replies.
    pub garbage: Option<Vec<u8>>,
    pub connections: usize,
    /// Number of connections that have ended.
    pub ended: usize,
    pub seen: Vec<(Command, u64, u32, CommandFlags)>,
}

pub struct Server {
    pub script: Arc<Mutex<Script>>,
    _dir: tempfile::TempDir,
    pub socket: PathBuf,
    pub uri: String,
}

struct Directory(ExportInfo);

impl ExportDirectory for Directory {
    fn find(&self, name: &str) -> Option<ExportInfo> {
        ["disk", "lent"].contains(&name).then(|| self.0.clone())
    }
    fn list(&self) -> Vec<(String, String)> {
        vec![("disk".into(), String::new())]
    }
}

impl Server {
    pub fn start(export: ExportInfo) -> Server {
        let dir = tempfile::tempdir().unwrap();
        let path: PathBuf = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let script = Arc::new(Mutex::new(Script {
            data: vec![0; export.size_bytes as usize],
            export,
            answers_left: None,
            refuse: false,
            shuts_down: false,
            shutdown_replies: 0,
            disconnects: 0,
            silent: false,
            sick: false,
            flush_fails: false,
            flush_answers: Vec::new(),
            withheld: Vec::new(),
            garbage: None,
            connections: 0,
            ended: 0,
            seen: Vec::new(),
        }));
        let shared = script.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (script, stream) = (shared.clone(), stream.unwrap());
                if script.lock().unwrap().refuse {
                    continue;
                }
                std::thread::spawn(move || {
                    let _ = serve(&stream, &script);
                    let _ = stream.shutdown(Shutdown::Both);
                    script.lock().unwrap().ended += 1;
                });
            }
        });
        let uri = format!("nbd+unix:///disk?socket={}", path.display());
        Server { script, _dir: dir, socket: path, uri }
    }

    pub fn set(&self, change: impl FnOnce(&mut Script)) {
        change(&mut self.script.lock().unwrap());
    }

    pub fn count(&self, command: Command) -> usize {
        self.script.lock().unwrap().seen.iter().filter(|(seen, ..)| *seen == command).count()
    }
}

fn negotiate(stream: &mut &UnixStream, export: ExportInfo) -> std::io::Result<Option<Negotiated>> {
    let mut handshake = Handshake::new(HandshakeLimits::default());
    let mut byte = [0];
    loop {
        while let Some(output) = handshake.poll_output() {
            stream.write_all(&output)?;
        }
        match handshake.poll_outcome() {
            Some(HandshakeOutcome::Done(negotiated)) => return Ok(Some(negotiated)),
            Some(_) => return Ok(None),
            None => {}
        }
        stream.read_exact(&mut byte)?;
        let consumed = handshake.handle_input(&byte, &Directory(export.clone()));
        assert_eq!(consumed, 1);
    }
}

fn serve(mut stream: &UnixStream, script: &Mutex<Script>) -> std::io::Result<()> {
    let export = script.lock().unwrap().export.clone();
    let Some(negotiated) = negotiate(&mut stream, export)? else { return Ok(()) };
    script.lock().unwrap().connections += 1;
    loop {
        let mut header = [0; 28];
        stream.read_exact(&mut header)?;
        let request = decode_request(&header).map_err(std::io::Error::other)?;
        let mut payload = vec![0; request.payload_len() as usize];
        stream.read_exact(&mut payload)?;
        if request.command == Command::Disconnect {
            let mut script = script.lock().unwrap();
            (script.shuts_down, script.disconnects) = (false, script.disconnects + 1);
            return Ok(());
        }
        let mut script = script.lock().unwrap();
        script.seen.push((request.command, request.offset, request.length, request.flags));
        if script.silent {
            drop(script);
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        match &mut script.answers_left {
            Some(0) => {
                script.answers_left = None;
                return Ok(());
            }
            Some(left) => *left -= 1,
            None => {}
        }
        let out = match script.garbage.take() {
            Some(garbage) => garbage,
            None if script.shuts_down || script.shutdown_replies > 0 => {
                script.shutdown_replies = script.shutdown_replies.saturating_sub(1);
                let mut out = Vec::new();
                reply::push_simple_error(&mut out, request.cookie, ErrorCode::Shutdown);
                out
            }
            None => answer(&mut script, &negotiated, &request, &payload),
        };
        drop(script);
        stream.write_all(&out)?;
    }
}

fn answer(
    script: &mut Script,
    negotiated: &Negotiated,
    request: &hob_nbd::Request,
    payload: &[u8],
) -> Vec<u8> {
    let mut out = Vec::new();
    let (cookie, offset, length) = (request.cookie, request.offset, request.length);
    let range = offset as usize..offset as usize + length as usize;
    let max = script.export.block_size_max;
    if matches!(request.command, Command::Read | Command::Write) && length > max
        || range.end > script.data.len()
    {
        reply::push_simple_error(&mut out, cookie, ErrorCode::Inval);
        return out;
    }
    match request.command {
        Command::Read if negotiated.structured_replies => {
            // The reply has two pieces, the second one first. Zeroes are sent as holes.
            let middle = range.start + (range.len() / 2).max(1);
            for (part, position) in
                [(middle..range.end, Position::More), (range.start..middle, Position::Last)]
            {
                let bytes = &script.data[part.clone()];
                let (at, len) = (part.start as u64, part.len() as u32);
                if bytes.is_empty() {
                    continue;
                } else if bytes.iter().all(|byte| *byte == 0) {
                    reply::push_hole(&mut out, cookie, at, len, position);
                } else {
                    reply::push_data_header(&mut out, cookie, at, len, position);
                    out.extend_from_slice(bytes);
                }
            }
        }
        Command::Read => {
            reply::push_simple_ok(&mut out, cookie);
            out.extend_from_slice(&script.data[range]);
        }
        Command::BlockStatus => {
            let extents = [Extent { length, state: 0 }];
            reply::push_block_status(&mut out, cookie, BASE_ALLOCATION_ID, &extents, Position::Last);
        }
        Command::Flush if !script.flush_answers.is_empty() => {
            script.withheld.push(cookie);
            if script.withheld.len() == script.flush_answers.len() {
                let withheld = std::mem::take(&mut script.withheld);
                for (number, succeeds) in std::mem::take(&mut script.flush_answers) {
                    match succeeds {
                        true => reply::push_simple_ok(&mut out, withheld[number]),
                        false => reply::push_simple_error(&mut out, withheld[number], ErrorCode::Io),
                    }
                }
            }
        }
        Command::Flush if script.flush_fails => reply::push_simple_error(&mut out, cookie, ErrorCode::Io),
        Command::Write if script.sick => reply::push_simple_error(&mut out, cookie, ErrorCode::Io),
        command => {
            match command {
                Command::Write => script.data[range].copy_from_slice(payload),
                Command::WriteZeroes => script.data[range].fill(0),
                _ => {}
            }
            reply::push_simple_ok(&mut out, cookie);
        }
    }
    out
}
