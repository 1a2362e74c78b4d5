//! A connection to QEMU's control protocol (QMP): one JSON object per line.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::proxmox;

/// Maximum time for QEMU's greeting. QEMU sends none while it serves another client.
const GREETING_MAX: Duration = Duration::from_secs(5);
/// Maximum time of one command. QEMU flushes the disks when it stops the VM.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// A command that QEMU refused.
#[derive(Debug, thiserror::Error)]
#[error("QEMU refuses {command}: {reason}")]
pub(super) struct Refused {
    command: String,
    reason: String,
}

/// A connection to one VM.
#[derive(Debug)]
pub(super) enum Monitor {
    /// A connection to a QMP socket.
    Socket {
        stream: BufReader<UnixStream>,
        /// Process id of QEMU.
        pid: Option<i32>,
        /// Number of commands that were sent.
        sent: u64,
    },
    /// A domain of libvirt, which has the socket and forwards commands.
    Libvirt { domain: String },
    /// The VM does not run.
    None,
}

impl Monitor {
    /// Connects to a QMP socket.
    ///
    /// # Errors
    /// QEMU does not answer, for example because another client is connected.
    pub(super) async fn connect(path: &Path) -> anyhow::Result<Monitor> {
        let at = path.display();
        let stream = UnixStream::connect(path).await.with_context(|| format!("cannot reach QEMU at {at}"))?;
        let pid = stream.peer_cred().ok().and_then(|cred| cred.pid());
        let mut stream = BufReader::new(stream);
        timeout(GREETING_MAX, line(&mut stream)).await.map_err(|_| {
            anyhow!("QEMU does not answer at {at}; another program may be connected to this socket")
        })??;
        let mut monitor = Monitor::Socket { stream, pid, sent: 0 };
        monitor.ask("qmp_capabilities", json!({})).await?;
        Ok(monitor)
    }

    /// Connects to a VM of Proxmox VE. Proxmox VE's own programs use the same socket, each for a short
    /// time.
    ///
    /// # Errors
    /// The VM does not run on this node, or another program stays connected.
    pub(super) async fn of_proxmox(vmid: u32) -> anyhow::Result<Monitor> {
        let path = proxmox::qmp(vmid);
        let mut monitor = Monitor::connect(&path).await?;
        if let Monitor::Socket { pid, .. } = &mut monitor {
            *pid = proxmox::pid(vmid).or(*pid);
        }
        Ok(monitor)
    }

    /// Connects to a domain of libvirt.
    ///
    /// # Errors
    /// The domain does not run.
    pub(super) async fn of_domain(domain: &str) -> anyhow::Result<Monitor> {
        let state = virsh(&["domstate", domain]).await?;
        match state.trim() {
            "running" | "paused" => Ok(Monitor::Libvirt { domain: domain.to_owned() }),
            state => bail!("the domain {domain} is in the state '{state}', not running"),
        }
    }

    /// Returns the process id of QEMU, if it is known.
    pub(super) fn pid(&self) -> Option<i32> {
        match self {
            Monitor::None => None,
            Monitor::Socket { pid, .. } => *pid,
            Monitor::Libvirt { domain } => {
                let pid = std::fs::read_to_string(format!("/run/libvirt/qemu/{domain}.pid")).ok()?;
                pid.trim().parse().ok()
            }
        }
    }

    /// Runs a command and returns its result. Events are skipped.
    ///
    /// # Errors
    /// [`Refused`] if QEMU refuses the command; another error if QEMU does not answer.
    pub(super) async fn ask(&mut self, command: &str, arguments: Value) -> anyhow::Result<Value> {
        let question = json!({ "execute": command, "arguments": arguments });
        let answer = timeout(ANSWER_MAX, self.exchange(&question))
            .await
            .map_err(|_| anyhow!("QEMU did not answer {command} in {} s", ANSWER_MAX.as_secs()))??;
        match (answer.get("return"), answer.pointer("/error/desc")) {
            (Some(result), _) => Ok(result.clone()),
            (None, reason) => {
                let reason = reason.and_then(Value::as_str).unwrap_or("no reason given").to_owned();
                Err(Refused { command: command.to_owned(), reason }.into())
            }
        }
    }

    async fn exchange(&mut self, question: &Value) -> anyhow::Result<Value> {
        match self {
            Monitor::None => bail!("the VM does not run"),
            Monitor::Socket { stream, sent, .. } => {
                // After a command of a client that ended meanwhile, QEMU sends the late reply to the
                // next client. The process id tells them apart.
                *sent += 1;
                let id = json!(format!("hob-{}-{sent}", std::process::id()));
                let mut question = question.clone();
                question["id"] = id.clone();
                stream.write_all(format!("{question}\n").as_bytes()).await.context("QEMU ended")?;
                loop {
                    let answer = line(stream).await?;
                    let is_refused_unread = answer.get("error").is_some() && answer.get("id").is_none();
                    if answer.get("id") == Some(&id) || is_refused_unread {
                        return Ok(answer);
                    }
                }
            }
            Monitor::Libvirt { domain } => {
                let text = virsh(&["qemu-monitor-command", domain, &question.to_string()]).await?;
                serde_json::from_str(&text).with_context(|| format!("virsh answered {text:?}"))
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

/// Runs `virsh` and returns its output.
///
/// # Errors
/// The error text of `virsh`.
pub(super) async fn virsh(args: &[&str]) -> anyhow::Result<String> {
    let mut command = std::process::Command::new("virsh");
    command.arg("-q").args(args);
    let output = tokio::task::spawn_blocking(move || command.output())
        .await?
        .context("cannot run virsh, which is in the package libvirt-clients")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("virsh {}: {}", args[0], said.trim().trim_start_matches("error: "));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

async fn line(stream: &mut BufReader<UnixStream>) -> anyhow::Result<Value> {
    let mut line = String::new();
    let count = stream.read_line(&mut line).await.context("the connection to QEMU failed")?;
    if count == 0 {
        bail!("QEMU closed the connection");
    }
    serde_json::from_str(&line).with_context(|| format!("QEMU answered {line:?}"))
}
