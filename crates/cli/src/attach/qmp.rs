//! A connection to QEMU's control protocol (QMP): one JSON object per line.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::proxmox;
use super::virsh::{Info, Shell, is_not_running, is_unknown_domain, virsh, when_reachable};

/// Maximum time for QEMU's greeting. QEMU sends none while it serves another client.
const GREETING_MAX: Duration = Duration::from_secs(5);
/// Maximum time of one command. QEMU flushes the disks when it stops the VM.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// Maximum length of a reply of QEMU, bytes. A malicious guest may control QEMU.
const LINE_BYTES_MAX: u64 = 64 << 20;
/// Maximum length of a text of QEMU in a message, characters.
const TEXT_CHARS_MAX: usize = 1000;

/// A command that QEMU refused.
#[derive(Debug, thiserror::Error)]
#[error("QEMU refuses {command}: {reason}")]
pub(super) struct Refused {
    command: String,
    reason: String,
}

/// The VM does not run.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub(super) struct NotRunning {
    pub(super) why: Absence,
    reason: String,
}

/// Why a VM does not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Absence {
    Stopped,
    /// libvirt has saved the VM's memory, and continues the VM at its next start.
    Saved,
    /// libvirt or Proxmox VE has no such VM on this host.
    Gone,
}

impl Absence {
    fn because(self, reason: String) -> anyhow::Error {
        NotRunning { why: self, reason }.into()
    }
}

/// The connection to QEMU ended.
#[derive(Debug, thiserror::Error)]
#[error("QEMU closed the connection")]
struct Disconnected;

/// Returns true if the error of a command shows that the VM has probably ended.
pub(super) fn is_ended(error: &anyhow::Error) -> bool {
    error.is::<Disconnected>() || is_not_running(error)
}

/// A connection to one VM.
#[derive(Debug)]
pub(super) enum Monitor {
    /// A connection to a QMP socket.
    Socket {
        path: PathBuf,
        /// Process that listens on the socket.
        peer: Option<i32>,
        stream: BufReader<UnixStream>,
        /// The first part of a reply that did not arrive in time.
        begun: Vec<u8>,
        /// Process id of QEMU.
        pid: Option<i32>,
        /// Number of commands that were sent.
        sent: u64,
    },
    /// A domain of libvirt. libvirt is connected to the QMP socket, and forwards commands.
    Libvirt {
        /// The domain as the user named it.
        domain: String,
        /// Name of the domain, as in libvirt's files.
        name: String,
        /// Forwards the commands. If it is absent, each command has its own process.
        shell: Option<Shell>,
    },
    /// The VM does not run.
    None,
}

impl Monitor {
    /// Connects to a QMP socket.
    ///
    /// # Errors
    /// Returns [`NotRunning`] if there is no such socket, or if no process listens on the socket.
    /// Returns another error if QEMU does not answer, for example because another client is
    /// connected.
    pub(super) async fn connect(path: &Path) -> anyhow::Result<Monitor> {
        let at = path.display();
        let stream = match UnixStream::connect(path).await {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
                return Err(Absence::Stopped.because(format!("QEMU has no QMP socket {at}: {error}")));
            }
            stream => stream.with_context(|| format!("cannot reach QEMU at {at}"))?,
        };
        let peer = stream.peer_cred().ok().and_then(|cred| cred.pid());
        let mut stream = BufReader::new(stream);
        let mut begun = Vec::new();
        timeout(GREETING_MAX, line(&mut stream, &mut begun)).await.map_err(|_| {
            anyhow!(
                "QEMU does not answer at {at}: another program may be connected to this socket, which accepts \
                 one at a time, or QEMU waits for its storage. End the other program, and repeat the command"
            )
        })??;
        let path = path.to_owned();
        let mut monitor = Monitor::Socket { path, peer, stream, begun, pid: peer, sent: 0 };
        monitor.ask("qmp_capabilities", json!({})).await?;
        Ok(monitor)
    }

    /// Connects again to a QEMU that has closed the connection. Does nothing if this QEMU has ended or
    /// does not answer.
    pub(super) async fn reconnect(&mut self) {
        let Monitor::Socket { path, peer, pid, .. } = self else { return };
        let Ok(mut new) = Monitor::connect(path).await else { return };
        if let Monitor::Socket { peer: now, pid: its, .. } = &mut new
            && now == peer
        {
            *its = *pid;
            *self = new;
        }
    }

    /// Connects to a VM of Proxmox VE. Proxmox VE's own programs use the same socket, each for a short
    /// time.
    ///
    /// # Errors
    /// Returns [`NotRunning`] if the VM does not run on this node, or another error if another
    /// program stays connected.
    pub(super) async fn of_proxmox(vmid: u32) -> anyhow::Result<Monitor> {
        let mut monitor = match Monitor::connect(&proxmox::qmp(vmid)).await {
            Err(error) if error.is::<NotRunning>() && proxmox::is_gone(vmid) => {
                return Err(Absence::Gone.because(format!("this node has no VM {vmid}")));
            }
            monitor => monitor?,
        };
        if let Monitor::Socket { pid, .. } = &mut monitor {
            *pid = proxmox::pid(vmid).or(*pid);
        }
        Ok(monitor)
    }

    /// Connects to a domain of libvirt.
    ///
    /// # Errors
    /// Returns [`NotRunning`] if the domain does not run or does not exist, or another error if
    /// libvirt does not answer.
    pub(super) async fn of_domain(domain: &str) -> anyhow::Result<Monitor> {
        let info = match Info::read(domain).await {
            Err(error) if is_unknown_domain(&error) => {
                let names = "'virsh list --all' shows the names";
                return Err(Absence::Gone.because(format!("libvirt has no domain {domain}; {names}")));
            }
            info => info?,
        };
        if let Some(absent) = absent(domain, &info) {
            return Err(absent);
        }
        match info.state.as_str() {
            "running" | "paused" => {
                let shell = Shell::open(domain).await;
                Ok(Monitor::Libvirt { domain: domain.to_owned(), name: info.name, shell })
            }
            state => bail!("the domain {domain} is in the state '{state}', not running"),
        }
    }

    /// Starts the process that forwards commands to libvirt, so that no command starts a process while
    /// the VM is paused.
    pub(super) async fn prepare(&mut self) {
        if let Monitor::Libvirt { domain, shell, .. } = self
            && shell.is_none()
        {
            *shell = Shell::open(domain).await;
        }
    }

    /// Returns the process id of QEMU, if it is known.
    pub(super) fn pid(&self) -> Option<i32> {
        match self {
            Monitor::None => None,
            Monitor::Socket { pid, .. } => *pid,
            Monitor::Libvirt { name, .. } => {
                let pid = std::fs::read_to_string(format!("/run/libvirt/qemu/{name}.pid")).ok()?;
                pid.trim().parse().ok()
            }
        }
    }

    /// Runs a command and returns its result. Events are skipped.
    ///
    /// # Errors
    /// Returns [`Refused`] if QEMU refuses the command, or another error if QEMU does not answer.
    pub(super) async fn ask(&mut self, command: &str, arguments: Value) -> anyhow::Result<Value> {
        let question = json!({ "execute": command, "arguments": arguments });
        let Ok(answer) = timeout(ANSWER_MAX, self.exchange(&question)).await else {
            // The late output of `virsh` must not be taken for that of the next command.
            if let Monitor::Libvirt { shell, .. } = self {
                *shell = None;
            }
            bail!("QEMU did not answer {command} in {} s", ANSWER_MAX.as_secs());
        };
        let answer = answer?;
        match (answer.get("return"), answer.pointer("/error/desc")) {
            (Some(result), _) => Ok(result.clone()),
            (None, reason) => {
                let reason = one_line(reason.and_then(Value::as_str).unwrap_or("no reason given"));
                Err(Refused { command: command.to_owned(), reason }.into())
            }
        }
    }

    async fn exchange(&mut self, question: &Value) -> anyhow::Result<Value> {
        match self {
            Monitor::None => bail!("the VM does not run"),
            Monitor::Socket { stream, begun, sent, .. } => {
                // QEMU can send a late reply to the next client, if the client that sent the
                // command has disconnected. The process id in `id` distinguishes the replies.
                *sent += 1;
                let id = json!(format!("hob-{}-{sent}", std::process::id()));
                let mut question = question.clone();
                question["id"] = id.clone();
                let sent = stream.write_all(format!("{question}\n").as_bytes()).await;
                sent.map_err(|_| Disconnected)?;
                loop {
                    let answer = line(stream, begun).await?;
                    let is_refused_unread = answer.get("error").is_some() && answer.get("id").is_none();
                    if answer.get("id") == Some(&id) || is_refused_unread {
                        return Ok(answer);
                    }
                }
            }
            Monitor::Libvirt { domain, shell, .. } => {
                if let Some(open) = shell {
                    match open.ask(&question.to_string()).await {
                        Ok(answer) => return Ok(answer),
                        // libvirt may have restarted, so the command is sent again. If QEMU has
                        // carried it out before, QEMU refuses it now. Each step then checks whether
                        // its change was made.
                        Err(_) => *shell = None,
                    }
                }
                let question = question.to_string();
                let args = ["qemu-monitor-command", domain.as_str(), question.as_str()];
                let text = when_reachable(async || virsh(&args).await).await?;
                serde_json::from_str(&text).with_context(|| format!("virsh answered '{}'", one_line(&text)))
            }
        }
    }

    /// Returns the names of QEMU's objects, as `object-add` names them.
    pub(super) async fn objects(&mut self) -> anyhow::Result<Vec<String>> {
        let list = self.ask("qom-list", json!({ "path": "/objects" })).await?;
        let names = list.as_array().into_iter().flatten();
        Ok(names.filter_map(|object| Some(object["name"].as_str()?.to_owned())).collect())
    }
}

/// Returns the error [`NotRunning`] for a domain of libvirt that is shut off.
fn absent(domain: &str, info: &Info) -> Option<anyhow::Error> {
    let start = format!("'virsh start {domain}'");
    match (info.state.as_str(), info.is_saved) {
        ("shut off", true) => {
            let reason =
                format!("the domain {domain} is saved ('virsh managedsave'), and {start} restores it");
            Some(Absence::Saved.because(reason))
        }
        ("shut off", false) => {
            Some(Absence::Stopped.because(format!("the domain {domain} is shut off; start it with {start}")))
        }
        _ => None,
    }
}

/// Reads one line. If the future is dropped, `begun` keeps the part that was read.
async fn line(stream: &mut BufReader<UnixStream>, begun: &mut Vec<u8>) -> anyhow::Result<Value> {
    let left = LINE_BYTES_MAX.saturating_sub(begun.len() as u64);
    match AsyncReadExt::take(stream, left).read_until(b'\n', begun).await {
        Ok(_) if begun.ends_with(b"\n") => {}
        Ok(_) if begun.len() as u64 >= LINE_BYTES_MAX => {
            bail!("QEMU's reply is longer than {LINE_BYTES_MAX} bytes")
        }
        Ok(_) => return Err(Disconnected.into()),
        Err(error) if error.kind() == ErrorKind::ConnectionReset => return Err(Disconnected.into()),
        Err(error) => return Err(error).context("the connection to QEMU failed"),
    }
    let line = std::mem::take(begun);
    serde_json::from_slice(&line)
        .with_context(|| format!("QEMU answered '{}'", one_line(&String::from_utf8_lossy(&line))))
}

/// Returns a text of QEMU for a message: one line of limited length, without control characters. A
/// malicious guest may control QEMU.
pub(super) fn one_line(text: &str) -> String {
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    let mut line: String = text.chars().take(TEXT_CHARS_MAX).map(plain).collect();
    if text.chars().nth(TEXT_CHARS_MAX).is_some() {
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn connect(path: &Path) -> anyhow::Error {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(Monitor::connect(path)).unwrap_err()
    }

    #[test]
    fn a_socket_without_a_vm_and_a_vm_without_an_answer_differ() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let error = connect(&path);
        assert!(error.is::<NotRunning>() && error.to_string().contains("qmp"), "{error:#}");
        // QEMU was killed.
        drop(UnixListener::bind(&path).unwrap());
        assert!(connect(&path).is::<NotRunning>());
        // Another program has the connection, so this one gets no greeting.
        std::fs::remove_file(&path).unwrap();
        let _busy = UnixListener::bind(&path).unwrap();
        let error = connect(&path);
        assert!(!error.is::<NotRunning>() && error.to_string().contains("another program"), "{error:#}");
    }

    #[test]
    fn a_saved_domain_and_one_that_is_shut_off_differ() {
        let info = |state: &str, is_saved| Info {
            name: "web".to_owned(),
            uuid: "0b1c".to_owned(),
            state: state.to_owned(),
            is_persistent: true,
            is_saved,
        };
        for (is_saved, why, text) in
            [(true, Absence::Saved, "virsh managedsave"), (false, Absence::Stopped, "is shut off")]
        {
            let error = absent("web", &info("shut off", is_saved)).unwrap();
            assert_eq!(error.downcast_ref::<NotRunning>().map(|error| error.why), Some(why));
            assert!(error.to_string().contains(text), "{error}");
        }
        assert!(absent("web", &info("running", false)).is_none());
    }

    #[test]
    fn a_text_of_qemu_is_one_line_of_limited_length() {
        assert_eq!(one_line("no disk\nhob: \u{1b}[31mall is well"), "no disk hob:  [31mall is well");
        assert_eq!(one_line("été"), "été");
        assert_eq!(one_line(&"é".repeat(1000)).chars().count(), 1000);
        assert_eq!(one_line(&"é".repeat(9000)).chars().count(), 1001);
    }

    /// A busy QEMU may send a part of a reply before the command's time is over.
    #[test]
    fn the_rest_of_a_late_reply_is_not_taken_for_another_reply() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (near, mut far) = UnixStream::pair().unwrap();
            let (mut stream, mut begun) = (BufReader::new(near), Vec::new());
            far.write_all(b"{\"late\":").await.unwrap();
            let early = timeout(Duration::from_millis(50), line(&mut stream, &mut begun)).await;
            assert!(early.is_err(), "half a line is no reply");
            far.write_all(b"1}\n{\"next\":2}\n").await.unwrap();
            assert_eq!(line(&mut stream, &mut begun).await.unwrap(), json!({ "late": 1 }));
            assert_eq!(line(&mut stream, &mut begun).await.unwrap(), json!({ "next": 2 }));
            drop(far);
            assert!(is_ended(&line(&mut stream, &mut begun).await.unwrap_err()));
        });
    }
}
