//! How large the file of an image can become, as qemu-img computes it.

use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, bail};
use serde_json::Value;

use super::record::Record;
use super::threads::in_thread;

/// Returns the necessary length of a file in bytes so that its image can grow to the full size,
/// because QEMU cannot enlarge hob's disk. The added part is a hole. Returns `None` for formats
/// that do not grow.
pub(super) async fn room(record: &Record) -> anyhow::Result<Option<u64>> {
    if matches!(record.format.as_str(), "raw" | "file" | "host_device") {
        return Ok(None);
    }
    let length = std::fs::metadata(&record.file)?.len();
    let full = measure(&record.file, &record.format).await?;
    // An earlier attachment may have extended the file. Its hole is not part of the image.
    let end = if length < full { length } else { end(&record.file, &record.format).await?.unwrap_or(length) };
    // Snapshots inside the image keep the present data, so the full size is added to the present
    // end.
    Ok(Some((end + full).next_multiple_of(1 << 20)))
}

/// Returns the size of a completely allocated image in bytes.
async fn measure(file: &Path, format: &str) -> anyhow::Result<u64> {
    let output = qemu_img(&["measure", "-O", format, "-f", format], file).await?;
    if !output.status.success() {
        bail!("qemu-img measure: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let sizes: Value = serde_json::from_slice(&output.stdout).context("qemu-img measure")?;
    sizes["fully-allocated"].as_u64().context("qemu-img measure does not say how large the image can become")
}

/// Returns the offset in bytes after the last allocated cluster of an image, or `None` if qemu-img
/// does not show it. QEMU may still keep newer allocations in memory. [`room`] leaves space for
/// these allocations, because it adds the full size of the active image to the offset.
async fn end(file: &Path, format: &str) -> anyhow::Result<Option<u64>> {
    // The exit status is an error if QEMU has not written all metadata yet.
    let output = qemu_img(&["check", "-f", format], file).await?;
    let found: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    Ok(found["image-end-offset"].as_u64())
}

/// Runs a command of qemu-img for an image that QEMU has open. The output is JSON.
async fn qemu_img(command: &[&str], file: &Path) -> anyhow::Result<Output> {
    let mut process = Command::new("qemu-img");
    process.args(command).args(["-U", "--output=json"]).arg(file);
    in_thread(move || process.output())
        .await?
        .context("cannot run qemu-img, which is in the package qemu-utils")
}
