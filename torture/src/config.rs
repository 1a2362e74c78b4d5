//! The configuration and the state directory of the daemon under test.

use std::path::Path;

use anyhow::Result;
use conformance::{Tool, Unmount};

use crate::daemon::Daemon;
use crate::disk::Disk;
use crate::setup::Plan;

/// Size of the file system of the state directory, bytes.
pub(crate) const STATE_BYTES: u64 = 1 << 20;

/// Size of a cache.
pub(crate) const CACHE: &str = "8M";

/// Creates the state directory on a small file system of its own, so that it can be filled.
pub(crate) fn mount_state(state: &Path) -> Result<Unmount> {
    std::fs::create_dir(state)?;
    let options = format!("size={STATE_BYTES},mode=700");
    let mount = Tool::new("mount").args(["-t", "tmpfs", "-o", &options, "torture-state"]).arg(state).output();
    anyhow::ensure!(mount.success(), "mount the state directory: {}", mount.all());
    Ok(Unmount::at(state))
}

/// Returns the text of hob.toml for a round in the directory `dir`.
pub(crate) fn text(plan: &Plan, dir: &Path, daemon: &Daemon, disks: &[Disk]) -> String {
    let at = |name: &str| dir.join(name).display().to_string();
    let mut text = format!(
        "state_dir = \"{}\"\nlisten = [\"unix:{}\"]\nring = \"{}\"\nshards = {}\n\
         [control]\nlisten = [\"unix:{}\"]\n[limits]\nbacking_wait_ms_max = {}\n\
         [[pool]]\nname = \"pool\"\ndevices = [\"{}\", \"{}\"]\nsize = \"{}\"\nsegment_size = \"1M\"\n",
        at("state"),
        daemon.nbd_socket().display(),
        plan.ring,
        plan.shards,
        daemon.control_socket().display(),
        plan.backing_wait_ms,
        at("flash/flash0"),
        at("flash/flash1"),
        plan.pool_device(),
    );
    for (number, (disk, planned)) in disks.iter().zip(&plan.disks).enumerate() {
        let backing = disk.backing.location();
        text += &format!("[[disk]]\nname = \"{}\"\nbacking = \"{backing}\"\n", disk.name);
        if planned.vhost_user {
            text += &format!("vhost_user = \"{}\"\n", at(&format!("vhost{number}.sock")));
        }
        if let Some(settings) = planned.cache.settings {
            let size = if planned.shared { String::new() } else { format!("size = \"{CACHE}\", ") };
            text += &format!("cache = {{ pool = \"pool\", {size}{settings} }}\n");
        }
    }
    text
}
