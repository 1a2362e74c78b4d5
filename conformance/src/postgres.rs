//! A PostgreSQL cluster with data checksums, and a client of its wire protocol that records acknowledged
//! commits.
//!
//! The server runs as the user that Debian's package creates. It listens only on a Unix socket in its data
//! directory.

use std::io::{Error, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;

use crate::process::Process;
use crate::scratch::{text, wait_until};
use crate::tool::Tool;

const USER: &str = "postgres";
/// Maximum time of recovery and of a clean stop.
const READY_MAX: Duration = Duration::from_secs(120);
/// Timeout of an answer: longer than any outage in the tests.
const ANSWER_MAX: Duration = Duration::from_secs(180);
/// Version 3.0 of the protocol.
const PROTOCOL: u32 = 3 << 16;

/// Frequent checkpoints and little memory, so that a small database reads and writes its disk.
const SETTINGS: &str = "\
listen_addresses = ''
shared_buffers = '4MB'
max_connections = 20
checkpoint_timeout = '30s'
min_wal_size = '4MB'
max_wal_size = '16MB'
bgwriter_delay = '20ms'
bgwriter_lru_maxpages = 1000
autovacuum_naptime = '1s'
log_checkpoints = off
";

/// A database cluster, with or without a running server.
#[derive(Debug)]
pub struct Postgres {
    data: PathBuf,
    server: Option<Process>,
    /// Log of the servers that have ended.
    log: String,
}

impl Postgres {
    /// Creates a cluster in the new directory `data` and starts its server.
    ///
    /// # Panics
    /// Panics if a program of PostgreSQL reports an error.
    #[must_use]
    #[track_caller]
    pub fn create(data: &Path) -> Self {
        std::fs::create_dir(data).expect("a new data directory");
        Tool::new("chown").arg(format!("{USER}:{USER}")).arg(data).run();
        let initdb = program("initdb").args(["--data-checksums", "--auth=trust", "--wal-segsize=1"]);
        // The first checkpoint syncs everything.
        initdb.args(["--no-sync", "--encoding=UTF8", "--locale=C", "--pgdata"]).arg(data).run();
        let conf = data.join("postgresql.conf");
        let settings = format!("{SETTINGS}unix_socket_directories = '{}'\n", text(data));
        std::fs::write(conf, settings).expect("the cluster's configuration");
        Tool::new("sync").arg("--file-system").arg(data).run();
        let mut cluster = Self { data: data.to_owned(), server: None, log: String::new() };
        cluster.start();
        cluster
    }

    /// Uses the existing cluster in `data`, without starting its server.
    #[must_use]
    pub fn existing(data: &Path) -> Self {
        Self { data: data.to_owned(), server: None, log: String::new() }
    }

    /// Starts the server and waits until recovery is done.
    ///
    /// # Panics
    /// Panics if the server ends, or takes too long to start.
    #[track_caller]
    pub fn start(&mut self) {
        let mut server = program("postgres").arg("-D").arg(&self.data).start();
        wait_until("PostgreSQL to answer", READY_MAX, || {
            assert!(server.poll().is_none(), "PostgreSQL ended: {}", server.stderr());
            self.connect().is_ok()
        });
        self.server = Some(server);
    }

    /// Stops the server after a checkpoint.
    ///
    /// # Panics
    /// Panics if a program of PostgreSQL reports an error.
    #[track_caller]
    pub fn stop(&mut self) {
        let status = self.end(Signal::INT);
        assert!(status.is_some_and(|s| s.success()), "PostgreSQL stopped with {status:?}: {}", self.log);
    }

    /// Ends the server immediately, as a crash does: the next start must recover.
    #[track_caller]
    pub fn crash(&mut self) {
        self.end(Signal::QUIT);
    }

    #[track_caller]
    fn end(&mut self, signal: Signal) -> Option<std::process::ExitStatus> {
        let mut server = self.server.take().expect("the server runs");
        server.signal(signal);
        let output = server.finish(READY_MAX);
        self.log += &output.stderr;
        output.status
    }

    /// Returns the process id of the server.
    ///
    /// # Panics
    /// Panics if the server is not running.
    #[must_use]
    #[track_caller]
    pub fn pid(&self) -> u32 {
        self.server.as_ref().expect("the server runs").pid()
    }

    /// Returns the log of all servers of this cluster.
    #[must_use]
    pub fn log(&self) -> String {
        format!("{}{}", self.log, self.server.as_ref().map(Process::stderr).unwrap_or_default())
    }

    /// Opens a new session.
    ///
    /// # Errors
    /// Returns an error if the server does not accept the connection.
    pub fn connect(&self) -> std::io::Result<Session> {
        Session::open(&self.data.join(".s.PGSQL.5432"))
    }

    /// Runs one statement in a new session.
    ///
    /// # Panics
    /// Panics if the statement fails.
    #[track_caller]
    pub fn query(&self, sql: &str) -> Vec<Vec<String>> {
        let rows = self.connect().and_then(|mut session| session.query(sql));
        rows.unwrap_or_else(|e| panic!("{sql}: {e}; the server's log: {}", self.log()))
    }

    /// Returns a PostgreSQL program that connects to this server.
    #[must_use]
    #[track_caller]
    pub fn client(&self, name: &str) -> Tool {
        program(name).arg("--host").arg(&self.data)
    }

    /// Verifies the checksum of each page. The server must be stopped.
    #[track_caller]
    pub fn check_checksums(&self) {
        assert!(self.server.is_none(), "pg_checksums needs a server that was stopped");
        program("pg_checksums").args(["--check", "--pgdata"]).arg(&self.data).run();
    }

    /// Verifies all tables and indexes, and that each row is in its indexes.
    #[track_caller]
    pub fn check_structure(&self) {
        let check = self.client("pg_amcheck").args(["--install-missing", "--heapallindexed"]);
        check.arg("postgres").run();
    }
}

/// Returns a PostgreSQL program that runs as its user.
#[track_caller]
fn program(name: &str) -> Tool {
    // The option for the death signal comes after the change of the user, because the change would
    // clear the signal.
    let user = ["--reuid", USER, "--regid", USER, "--clear-groups", "--pdeathsig", "KILL", "--"];
    Tool::new("setpriv").args(user).arg(directory().join(name)).env("LC_ALL", "C")
}

/// Returns the directory of the newest installed version's programs.
#[track_caller]
fn directory() -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let newest = versions
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse::<u32>().ok()?, entry.path())))
        .filter(|(_, path)| path.join("bin/initdb").is_file())
        .max();
    newest.expect("PostgreSQL is installed; `cargo xtask test` installs what this suite needs").1.join("bin")
}

/// A session: one statement at a time, each a transaction of its own.
#[derive(Debug)]
pub struct Session {
    stream: UnixStream,
}

impl Session {
    fn open(socket: &Path) -> std::io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(ANSWER_MAX))?;
        let names = b"user\0postgres\0database\0postgres\0\0";
        let mut hello = (8 + names.len() as u32).to_be_bytes().to_vec();
        hello.extend(PROTOCOL.to_be_bytes());
        hello.extend(names);
        stream.write_all(&hello)?;
        let mut session = Self { stream };
        session.answer()?;
        Ok(session)
    }

    /// Runs a statement and returns its rows. When this returns without an error, the server has
    /// acknowledged the commit.
    ///
    /// # Errors
    /// Returns the error that the server reports, or an error if the connection has ended.
    pub fn query(&mut self, sql: &str) -> std::io::Result<Vec<Vec<String>>> {
        let mut message = vec![b'Q'];
        message.extend((4 + sql.len() as u32 + 1).to_be_bytes());
        message.extend(sql.as_bytes());
        message.push(0);
        self.stream.write_all(&message)?;
        self.answer()
    }

    /// Reads messages until the server is ready for the next statement.
    fn answer(&mut self) -> std::io::Result<Vec<Vec<String>>> {
        let (mut rows, mut failure) = (Vec::new(), None);
        loop {
            let mut head = [0; 5];
            self.stream.read_exact(&mut head)?;
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
            let mut body = vec![0; length as usize - 4];
            self.stream.read_exact(&mut body)?;
            match head[0] {
                b'D' => rows.push(row(&body)),
                b'E' => failure = Some(String::from_utf8_lossy(&body).replace('\0', " ")),
                b'Z' => return failure.map_or(Ok(rows), |text| Err(Error::other(text))),
                _ => {}
            }
            // A server that refuses or ends reports the reason and closes the connection.
            if head[0] == b'E' && failure.as_ref().is_some_and(|text| text.contains("FATAL")) {
                return Err(Error::other(failure.unwrap_or_default()));
            }
        }
    }
}

/// Returns the columns of a row as text; NULL is empty.
fn row(body: &[u8]) -> Vec<String> {
    let count = u16::from_be_bytes([body[0], body[1]]);
    let mut rest = &body[2..];
    let column = |_| {
        let (length, tail) = rest.split_at(4);
        let length = i32::from_be_bytes(length.try_into().expect("four bytes"));
        let (value, tail) = tail.split_at(length.max(0) as usize);
        rest = tail;
        String::from_utf8_lossy(value).into_owned()
    };
    (0..count).map(column).collect()
}
