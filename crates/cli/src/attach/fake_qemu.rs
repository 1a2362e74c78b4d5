//! A QMP server for tests, which answers from a function and records the commands.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

/// A fake QEMU, which serves one QMP connection at a time.
pub(super) struct FakeQemu {
    dir: tempfile::TempDir,
    asked: Arc<Mutex<Vec<String>>>,
}

impl FakeQemu {
    /// Starts the server. `answer` returns the result of a command, an object with `error`, or null to
    /// end the connection.
    pub(super) fn start(mut answer: impl FnMut(&str) -> Value + Send + 'static) -> FakeQemu {
        let dir = tempfile::tempdir().expect("a directory");
        let qemu = FakeQemu { dir, asked: Arc::default() };
        let listener = UnixListener::bind(qemu.path()).expect("a socket");
        let asked = qemu.asked.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.expect("a client");
                let lines = BufReader::new(stream.try_clone().expect("a descriptor")).lines();
                writeln!(stream, "{}", json!({ "QMP": {} })).expect("a client");
                for line in lines.map_while(Result::ok) {
                    let question: Value = serde_json::from_str(&line).expect("JSON");
                    let command = question["execute"].as_str().expect("a command").to_owned();
                    let result = answer(&command);
                    asked.lock().expect("no panic").push(command);
                    let mut reply = match result {
                        Value::Null => break,
                        error if error.get("error").is_some() => error,
                        result => json!({ "return": result }),
                    };
                    reply["id"] = question["id"].clone();
                    if writeln!(stream, "{reply}").is_err() {
                        break;
                    }
                }
            }
        });
        qemu
    }

    /// The path of the QMP socket.
    pub(super) fn path(&self) -> PathBuf {
        self.dir.path().join("qmp")
    }

    /// Returns the names of all commands so far.
    pub(super) fn asked(&self) -> Vec<String> {
        self.asked.lock().expect("no panic").clone()
    }
}
