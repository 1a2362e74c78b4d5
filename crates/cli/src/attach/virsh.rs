//! Runs `virsh`: one process for each question to libvirt, and one process for all commands to
//! QEMU. The start of a process takes longer than a command, and hob sends some commands while the
//! VM is paused.

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::threads::in_thread;

/// Maximum time for the first reply of a [`Shell`]. Without a reply, each command has its own process.
const READY_MAX: Duration = Duration::from_secs(5);
/// Maximum time for libvirt to restart. The VM may be paused meanwhile.
const RESTART_MAX: Duration = Duration::from_secs(30);
/// Pause between two attempts to reach libvirt.
const RESTART_EVERY: Duration = Duration::from_millis(500);
/// Maximum length of the output for one command, bytes.
const OUTPUT_BYTES_MAX: usize = 64 << 20;

/// Returns the command `virsh`, with output that is not translated. Ctrl-C must not end `virsh`,
/// because hob uses it to undo the steps.
pub(super) fn command() -> Command {
    let mut command = Command::new("virsh");
    command.env("LC_ALL", "C").arg("-q").process_group(0);
    command
}

/// Runs `virsh` and returns its output.
///
/// # Errors
/// Returns the error text of `virsh`.
pub(super) async fn virsh(args: &[&str]) -> anyhow::Result<String> {
    let mut command = command();
    command.args(args);
    let output = in_thread(move || command.output())
        .await?
        .context("cannot run virsh, which is in the package libvirt-clients")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("virsh {}: {}", args[0], said.trim().trim_start_matches("error: "));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Calls a function that uses `virsh`, and repeats the call while libvirt's daemon restarts. A
/// repeated call must be harmless.
pub(super) async fn when_reachable<T>(mut call: impl AsyncFnMut() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let start = Instant::now();
    loop {
        match call().await {
            Err(error) if is_unreachable(&error) && start.elapsed() < RESTART_MAX => {
                tokio::time::sleep(RESTART_EVERY).await;
            }
            result => return result,
        }
    }
}

/// Returns true if an error of [`virsh`] says that libvirt does not have the domain.
pub(super) fn is_unknown_domain(error: &anyhow::Error) -> bool {
    says(error, &["failed to get domain", "Domain not found"])
}

/// Returns true if an error of [`virsh`] says that the domain does not run or does not exist.
pub(super) fn is_not_running(error: &anyhow::Error) -> bool {
    is_unknown_domain(error) || says(error, &["domain is not running"])
}

/// Returns true if an error of [`virsh`] says that libvirt's daemon does not answer, for example
/// because it restarts.
fn is_unreachable(error: &anyhow::Error) -> bool {
    let parts = [
        "failed to connect to the hypervisor",
        "client socket is closed",
        "End of file while reading",
        "Cannot recv data",
        "Cannot write data",
    ];
    says(error, &parts)
}

fn says(error: &anyhow::Error, parts: &[&str]) -> bool {
    let said = format!("{error:#}");
    parts.iter().any(|part| said.contains(part))
}

/// The state of a domain.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Info {
    /// Name of the domain, also if the user gave its UUID.
    pub(super) name: String,
    pub(super) uuid: String,
    /// The state in words of `virsh`.
    pub(super) state: String,
    /// True if libvirt has a persistent definition of the domain.
    pub(super) is_persistent: bool,
    /// True if libvirt has saved the domain's memory (`virsh managedsave`), for its next start.
    pub(super) is_saved: bool,
}

impl Info {
    /// Reads the state of a domain.
    ///
    /// # Errors
    /// Returns the error text of `virsh`, or an error if `virsh` found a domain of another name.
    pub(super) async fn read(domain: &str) -> anyhow::Result<Info> {
        Info::parse(domain, &virsh(&["dominfo", domain]).await?)
    }

    fn parse(domain: &str, text: &str) -> anyhow::Result<Info> {
        let of = |key: &str| {
            let mut values = text.lines().filter_map(|line| line.split_once(':'));
            values.find(|(found, _)| found.trim() == key).map_or("", |(_, value)| value.trim())
        };
        let (name, uuid) = (of("Name"), of("UUID"));
        if name != domain && uuid != domain {
            bail!(
                "virsh takes '{domain}' for the id of the domain {name}. Name that domain 'libvirt:{name}'. If a \
                 domain has the name '{domain}', name it by its UUID ('virsh list --all --uuid --name')"
            );
        }
        Ok(Info {
            name: name.to_owned(),
            uuid: uuid.to_owned(),
            state: of("State").to_owned(),
            is_persistent: of("Persistent") == "yes",
            is_saved: of("Managed save") == "yes",
        })
    }
}

/// A `virsh` that is connected to libvirt and reads commands.
#[derive(Debug)]
pub(super) struct Shell {
    child: Child,
    /// Standard input, output and error of the process.
    stream: UnixStream,
    domain: String,
    /// Number of commands that were sent.
    sent: u64,
}

impl Shell {
    /// Starts `virsh` and waits until it has answered a command. Returns `None` if `virsh` does not
    /// answer.
    pub(super) async fn open(domain: &str) -> Option<Shell> {
        Shell::start(command(), domain).await.ok()
    }

    async fn start(mut command: Command, domain: &str) -> anyhow::Result<Shell> {
        let is_plain = domain.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-+".contains(&byte));
        if !is_plain {
            bail!("virsh may not read the name as one word");
        }
        let (near, far) = std::os::unix::net::UnixStream::pair()?;
        near.set_nonblocking(true)?;
        let far = OwnedFd::from(far);
        command.stdin(far.try_clone()?).stdout(far.try_clone()?).stderr(far);
        // Ctrl-C must not end virsh, which hob needs to continue the VM.
        let child = command.env("TERM", "dumb").process_group(0).spawn()?;
        // Closes this process's copies of the far end of the socket, so that the end of virsh ends
        // the stream.
        drop(command);
        let stream = UnixStream::from_std(near)?;
        let mut shell = Shell { child, stream, domain: domain.to_owned(), sent: 0 };
        let reply = timeout(READY_MAX, shell.ask(r#"{"execute":"query-status"}"#)).await??;
        if reply.get("return").is_none() {
            bail!("QEMU does not answer");
        }
        Ok(shell)
    }

    /// Sends a command to QEMU, and returns QEMU's reply.
    ///
    /// # Errors
    /// Returns the error text of `virsh`.
    pub(super) async fn ask(&mut self, question: &str) -> anyhow::Result<Value> {
        self.sent += 1;
        let (domain, number) = (&self.domain, self.sent);
        // virsh also prints its input. The quotes distinguish it from the output.
        let line =
            format!("qemu-monitor-command {domain} '{}'; echo hob-\"done\"-{number}\n", quoted(question));
        let end = format!("hob-done-{number}");
        self.stream.write_all(line.as_bytes()).await.context("virsh ended")?;
        let mut output = Vec::new();
        let mut part = [0; 8192];
        loop {
            match self.stream.read(&mut part).await.context("virsh ended")? {
                0 => bail!("virsh ended"),
                count => output.extend_from_slice(&part[..count]),
            }
            let reply = String::from_utf8_lossy(&output).split_once(&end).map(|(said, _)| reply(said));
            if let Some(reply) = reply {
                return reply;
            }
            if output.len() > OUTPUT_BYTES_MAX {
                bail!("virsh prints more than {OUTPUT_BYTES_MAX} bytes");
            }
        }
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns JSON without the characters that end a word of `virsh` or edit its input line.
fn quoted(json: &str) -> String {
    let mut plain = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            ' '..='&' | '('..='~' => plain.push(c),
            _ => {
                c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| plain.push_str(&format!("\\u{unit:04x}")))
            }
        }
    }
    plain
}

/// Returns QEMU's reply in the output of `virsh`.
fn reply(said: &str) -> anyhow::Result<Value> {
    let is_reply = |value: &Value| value.get("return").is_some() || value.get("error").is_some();
    let parsed = |line: &str| serde_json::from_str(line[line.find('{')?..].trim()).ok().filter(is_reply);
    if let Some(reply) = said.lines().rev().find_map(parsed) {
        return Ok(reply);
    }
    let error = said.lines().rev().find_map(|line| line.strip_prefix("error: "));
    bail!("virsh qemu-monitor-command: {}", error.unwrap_or("no reply of QEMU"))
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    /// A shell script that prints its input and QEMU's replies, as virsh 9.0 does.
    const FAKE: &str = r#"printf 'virsh # '
        while read -r line; do
            printf '%s\n' "$line"
            case $line in *bad*) echo 'error: internal error: client socket is closed' >&2 ;;
            *) printf '{"return":{"asked":%s},"id":"libvirt-7"}\n' "${line##*-}" ;; esac
            printf 'hob-done-%svirsh # ' "${line##*-}"
        done"#;

    fn with_shell<T>(script: &str, domain: &str, work: impl AsyncFnOnce(anyhow::Result<Shell>) -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        runtime.block_on(async { work(Shell::start(command, domain).await).await })
    }

    #[test]
    fn one_virsh_runs_many_commands() {
        with_shell(FAKE, "web", async |shell| {
            let mut shell = shell.unwrap();
            for number in 2..12 {
                let reply = shell.ask(r#"{"execute":"stop","arguments":{"a":"it's"}}"#).await.unwrap();
                assert_eq!(reply["return"]["asked"], number);
            }
            let error = shell.ask("bad").await.unwrap_err().to_string();
            assert!(error.contains("client socket is closed"), "{error}");
            assert!(shell.ask("{}").await.is_ok(), "it continues after an error");
        });
    }

    #[test]
    fn a_virsh_that_does_not_answer_is_not_used() {
        for script in ["exit 1", "echo 'error: failed to connect to the hypervisor' >&2; exit 1"] {
            assert!(with_shell(script, "web", async |shell| shell.is_err()), "{script}");
        }
        assert!(with_shell(FAKE, "web; destroy other", async |shell| shell.is_err()));
    }

    #[test]
    fn json_stays_json_in_quotes_of_virsh() {
        let json = r#"{"file":"/srv/it's ä 𝄞.img","a":"\\\t"}"#;
        let plain = quoted(json);
        assert!(plain.is_ascii() && !plain.contains('\''), "{plain}");
        let parse = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        assert_eq!(parse(&plain), parse(json));
    }

    /// Output of virsh 9.0 with readline, which scrolls long lines.
    #[test]
    fn replies_are_distinguished_from_the_input() {
        let said =
            "\r<alse},\"file\":\"hob-12\"}]}}'; echo hob-\"done\"-2\n{\"return\":{},\"id\":\"libvirt-9\"}\n";
        assert_eq!(reply(said).unwrap()["id"], "libvirt-9");
        let said = "virsh # qemu-monitor-command web '{\"execute\":\"stop\"}'; echo hob-\"done\"-1\n\
                    {\"id\":\"libvirt-9\",\"error\":{\"class\":\"GenericError\",\"desc\":\"no\"}}\n";
        assert_eq!(reply(said).unwrap()["error"]["desc"], "no");
        let error = reply("virsh # x\nerror: failed to get domain 'web'\n").unwrap_err();
        assert!(is_unknown_domain(&error), "{error}");
    }

    #[test]
    fn a_domain_is_not_confused_with_the_id_of_another_one() {
        let text = "Id:             100\nName:           web\nUUID:           0b1c\nOS Type:        hvm\n\
                    State:          running\nPersistent:     yes\nManaged save:   no\n";
        for domain in ["web", "0b1c"] {
            let info = Info::parse(domain, text).unwrap();
            let [name, uuid, state] = ["web", "0b1c", "running"].map(str::to_owned);
            assert_eq!(info, Info { name, uuid, state, is_persistent: true, is_saved: false });
        }
        let saved = text.replace("running", "shut off").replace("save:   no", "save:   yes");
        assert!(Info::parse("web", &saved).unwrap().is_saved);
        let error = Info::parse("100", text).unwrap_err().to_string();
        assert!(error.contains("libvirt:web"), "{error}");
    }

    #[test]
    fn a_restart_of_libvirt_and_the_end_of_a_domain_differ() {
        let restarts = anyhow!("virsh qemu-monitor-command: failed to connect to the hypervisor");
        assert!(is_unreachable(&restarts) && !is_not_running(&restarts));
        let ended = anyhow!("Requested operation is not valid: domain is not running").context("cannot stop");
        assert!(is_not_running(&ended) && !is_unreachable(&ended));
    }

    #[test]
    fn a_question_is_repeated_while_libvirt_restarts() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut errors = vec!["Domain not found", "Cannot recv data: Connection reset by peer"];
            let call = async || -> anyhow::Result<()> { Err(anyhow!(errors.pop().expect("an error"))) };
            let error = when_reachable(call).await.unwrap_err();
            assert!(is_unknown_domain(&error) && errors.is_empty(), "{error}");
        });
    }

    #[test]
    fn a_missing_domain_is_recognized() {
        assert!(is_unknown_domain(&anyhow!("virsh domstate: failed to get domain 'web'")));
        assert!(!is_unknown_domain(&anyhow!("virsh domstate: failed to connect to the hypervisor")));
    }
}
