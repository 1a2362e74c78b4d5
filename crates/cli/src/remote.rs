//! Connecting to a running daemon, for all client commands.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::pin::Pin;

use anyhow::{Context, bail};
use hob_control::client::{Client, ClientError};
use hob_control::{ClientTls, Endpoint};
use hob_daemon::CONTROL_SOCKET;

use super::Global;

/// Next step if the daemon accepts connections and does not answer.
const SEE_STATE: &str =
    "; on its host, 'systemctl status hob' shows its state, and 'journalctl -u hob' its log";

/// Runs one exchange with the daemon that the options select. A request that only reads fails soon
/// if the daemon does not answer.
pub(super) fn ask<T>(
    global: &Global,
    exchange: impl AsyncFnOnce(Client) -> Result<T, ClientError>,
) -> anyhow::Result<T> {
    converse(global, async |client| exchange(client.with_liveness_check()).await.map_err(explain))
}

/// Runs work with a client of the daemon that the options select.
pub(super) fn converse<T>(
    global: &Global,
    work: impl AsyncFnOnce(Client) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let client = client(global)?;
    let mut result = None;
    run(Box::pin(async { result = Some(work(client).await) }))?;
    result.expect("it ran to its end")
}

fn client(global: &Global) -> anyhow::Result<Client> {
    let endpoint = endpoint(global)?;
    let is_tcp = matches!(endpoint, Endpoint::Tcp { .. });
    let client = Client::new(endpoint, token(global)?);
    Ok(match if is_tcp { tls(global)? } else { None } {
        Some(tls) => client.with_tls(tls),
        None => client,
    })
}

/// Runs a future. All commands use this one future type, so that the runtime's code is compiled
/// only once.
fn run(work: Pin<Box<dyn Future<Output = ()> + '_>>) -> anyhow::Result<()> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
    runtime.block_on(work);
    Ok(())
}

/// Adds a hint to an error of the API.
pub(super) fn explain(error: ClientError) -> anyhow::Error {
    let next = match &error {
        // The queue of the daemon's socket is full.
        ClientError::Unreachable { source, .. } if source.kind() == ErrorKind::WouldBlock => SEE_STATE,
        ClientError::TimedOut { .. } => SEE_STATE,
        ClientError::Unreachable { .. } => "; start it with 'hob daemon' or name its socket with --control",
        ClientError::Refused { status: 401, .. } => {
            "; give a token with --token-file, or a certificate with --cert and --key"
        }
        ClientError::NoTls { .. } => "; name the authority of its certificate with --ca",
        _ => "",
    };
    Explained { error, next }.into()
}

/// An error of a call to the daemon, with the next step for the user.
#[derive(Debug, thiserror::Error)]
#[error("{error}{next}")]
pub(super) struct Explained {
    pub(super) error: ClientError,
    next: &'static str,
}

fn endpoint(global: &Global) -> anyhow::Result<Endpoint> {
    if let Some(endpoint) = &global.control {
        return Ok(endpoint.clone());
    }
    match std::env::var("HOB_CONTROL") {
        Ok(text) if !text.is_empty() => Endpoint::parse_control(&text).context("HOB_CONTROL"),
        _ => Ok(Endpoint::Unix(CONTROL_SOCKET.into())),
    }
}

fn token(global: &Global) -> anyhow::Result<Option<String>> {
    let Some(path) = file(global.token_file.as_deref(), "HOB_TOKEN_FILE") else { return Ok(None) };
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(Some(text.trim().to_owned()))
}

fn tls(global: &Global) -> anyhow::Result<Option<ClientTls>> {
    let Some(authorities) = file(global.ca.as_deref(), "HOB_CA") else { return Ok(None) };
    let cert = file(global.cert.as_deref(), "HOB_CERT");
    let key = file(global.key.as_deref(), "HOB_KEY");
    let own = match (&cert, &key) {
        (Some(cert), Some(key)) => Some((cert.as_path(), key.as_path())),
        (None, None) => None,
        _ => bail!("HOB_CERT and HOB_KEY go together"),
    };
    Ok(Some(ClientTls::load(&authorities, own)?))
}

/// Returns the file named by an option, or else by an environment variable.
fn file(option: Option<&Path>, variable: &str) -> Option<PathBuf> {
    let from_env = || std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    option.map(Path::to_owned).or_else(from_env)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_daemon_that_does_not_run_is_to_be_started() {
        let endpoint = || Endpoint::Unix("/run/hob/control.sock".into());
        let unreachable =
            |kind: ErrorKind| ClientError::Unreachable { endpoint: endpoint(), source: kind.into() };
        let silent = ClientError::TimedOut { endpoint: endpoint(), seconds: 12 };
        for (error, next) in [
            (silent, "'systemctl status hob'"),
            (unreachable(ErrorKind::WouldBlock), "'systemctl status hob'"),
            (unreachable(ErrorKind::ConnectionRefused), "start it with 'hob daemon'"),
            (unreachable(ErrorKind::NotFound), "start it with 'hob daemon'"),
        ] {
            let error = explain(error).to_string();
            assert!(error.contains(next), "{error}");
        }
    }
}
