//! Asking a running daemon: what all client commands share.

use std::path::Path;

use anyhow::{Context, anyhow};
use hob_control::Endpoint;
use hob_control::client::{Client, ClientError};

use super::Global;
use crate::daemon::config::CONTROL_SOCKET;

/// Runs one exchange with the daemon that the options name.
pub(super) fn ask<T>(
    global: &Global,
    exchange: impl AsyncFnOnce(Client) -> Result<T, ClientError>,
) -> anyhow::Result<T> {
    converse(global, async |client| exchange(client).await.map_err(explain))
}

/// Runs whatever needs the daemon that the options name.
pub(super) fn converse<T>(
    global: &Global,
    work: impl AsyncFnOnce(Client) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let client = Client::new(endpoint(global)?, token(global)?);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
    runtime.block_on(work(client))
}

/// What went wrong, and what to do about it.
pub(super) fn explain(error: ClientError) -> anyhow::Error {
    match &error {
        ClientError::Unreachable { .. } => {
            anyhow!("{error}; start it with 'hob daemon' or name its socket with --control")
        }
        ClientError::Refused { status: 401, .. } => {
            anyhow!("{error}; give the daemon's token with --token-file")
        }
        _ => anyhow!("{error}"),
    }
}

fn endpoint(global: &Global) -> anyhow::Result<Endpoint> {
    if let Some(endpoint) = &global.control {
        return Ok(endpoint.clone());
    }
    match std::env::var("HOB_CONTROL") {
        Ok(text) if !text.is_empty() => text.parse().context("HOB_CONTROL"),
        _ => Ok(Endpoint::Unix(CONTROL_SOCKET.into())),
    }
}

fn token(global: &Global) -> anyhow::Result<Option<String>> {
    let from_env = std::env::var_os("HOB_TOKEN_FILE");
    let Some(path) = global.token_file.as_deref().or(from_env.as_deref().map(Path::new)) else {
        return Ok(None);
    };
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(Some(text.trim().to_owned()))
}
