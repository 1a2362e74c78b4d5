//! Runs fio and parses its report. Latencies are in microseconds.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use conformance::process::Process;
use serde_json::Value;

use super::vhost::DriverKind;
use crate::shell::Interrupt;

/// An I/O pattern of fio.
#[derive(Debug)]
pub(crate) struct Workload {
    /// Name of the pattern in the table.
    pub(crate) name: &'static str,
    /// fio's name of the pattern.
    pub(crate) rw: &'static str,
    /// Request size in fio's notation.
    pub(crate) block: &'static str,
    /// Queue depth.
    pub(crate) depth: u32,
    /// True to flush after each write.
    pub(crate) flushes: bool,
}

/// Target of fio's I/O.
#[derive(Debug, Clone)]
pub(crate) enum Target {
    /// An NBD export.
    Uri(String),
    /// A file, opened with O_DIRECT.
    File(String),
    /// A mounted file of a server, opened with O_DIRECT. fio uses libaio: FUSE does not support
    /// io_uring's non-blocking mode, so io_uring would use a thread per request.
    Mounted(String),
    /// An image in the Ceph pool `rbd`, through librbd.
    Rbd {
        /// Name of the image.
        image: &'static str,
        /// Path of the Ceph configuration file.
        conf: String,
    },
    /// A vhost-user-blk socket. fio does not support vhost-user-blk, so the module `vhost` sends
    /// the requests with this driver.
    VhostUser(PathBuf, DriverKind),
}

/// NBD clients that run at the same time.
#[derive(Debug)]
pub(crate) struct Clients<'a> {
    /// URIs of the exports.
    pub(crate) uris: &'a [String],
    /// Number of connections to each export. Each connection has the queue depth of the workload.
    pub(crate) connections: u32,
    /// Start of the range of all requests, bytes.
    pub(crate) offset: u64,
    /// Length of this range, bytes.
    pub(crate) size: u64,
}

/// Maximum time of a run that ends after a fixed number of requests.
const ONCE_MAX: Duration = Duration::from_secs(600);

/// Results of one fio run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Figures {
    pub(crate) ios: u64,
    pub(crate) iops: f64,
    pub(crate) mean_us: f64,
    pub(crate) p99_us: f64,
}

/// Runs `workload` on the first `size` bytes of `target` for `seconds`.
pub(crate) fn run(
    target: &Target,
    workload: &Workload,
    size: u64,
    seconds: u32,
    interrupt: &Interrupt,
) -> Result<Figures> {
    if let Target::VhostUser(socket, driver) = target {
        return super::vhost::run(socket, *driver, workload, size, Some(seconds), interrupt);
    }
    let limits = ["--time_based".to_owned(), format!("--runtime={seconds}")];
    call(target, workload, size, &limits, Duration::from_secs(u64::from(seconds) * 5 + 60), interrupt)
}

/// Reads the first `size` bytes of `target` once, sequentially.
pub(crate) fn read_once(target: &Target, size: u64, interrupt: &Interrupt) -> Result<Figures> {
    let workload = Workload { name: "once", rw: "read", block: "64k", depth: 8, flushes: false };
    if let Target::VhostUser(socket, driver) = target {
        return super::vhost::run(socket, *driver, &workload, size, None, interrupt);
    }
    call(target, &workload, size, &[], ONCE_MAX, interrupt)
}

/// Runs `workload` with all clients for `time`, or without a time until each client has read or
/// written its range once. Returns the totals of the clients. fio's job file is written to `file`.
pub(crate) fn run_clients(
    clients: &Clients<'_>,
    workload: &Workload,
    time: Option<Duration>,
    file: &Path,
    interrupt: &Interrupt,
) -> Result<Figures> {
    std::fs::write(file, job_file(clients, workload, time))
        .with_context(|| format!("write {}", file.display()))?;
    let mut command = Command::new("/usr/bin/env");
    command.args(["fio", "--output-format=json"]).arg(file);
    let time_max = time.map_or(ONCE_MAX, |time| time * 5 + Duration::from_secs(60));
    finish(&mut command, workload, "the NBD exports", time_max, interrupt)
}

/// Returns fio's job file for these clients. fio reports the clients as one group.
fn job_file(clients: &Clients<'_>, workload: &Workload, time: Option<Duration>) -> String {
    let mut text = format!(
        "[global]\nioengine=nbd\nrw={}\nbs={}\niodepth={}\nnumjobs={}\noffset={}\nsize={}\n\
         randrepeat=0\nnorandommap\nlat_percentiles=1\ngroup_reporting\n",
        workload.rw, workload.block, workload.depth, clients.connections, clients.offset, clients.size
    );
    if let Some(time) = time {
        text += &format!("time_based\nruntime={}ms\n", time.as_millis());
    }
    if workload.flushes {
        text += "fsync=1\n";
    }
    for (number, uri) in clients.uris.iter().enumerate() {
        text += &format!("[client{number}]\nuri={uri}\n");
    }
    text
}

fn call(
    target: &Target,
    workload: &Workload,
    size: u64,
    limits: &[String],
    time_max: Duration,
    interrupt: &Interrupt,
) -> Result<Figures> {
    let mut command = Command::new("/usr/bin/env");
    command.args(["fio", "--name=bench", "--output-format=json", "--lat_percentiles=1"]);
    command.args(["--randrepeat=0", "--norandommap", &format!("--size={size}")]);
    command.arg(format!("--rw={}", workload.rw)).arg(format!("--bs={}", workload.block));
    command.arg(format!("--iodepth={}", workload.depth)).args(limits);
    if workload.flushes {
        command.arg("--fsync=1");
    }
    match target {
        Target::Uri(uri) => command.args(["--ioengine=nbd", &format!("--uri={uri}")]),
        Target::File(path) => {
            command.args(["--ioengine=io_uring", "--direct=1", &format!("--filename={path}")])
        }
        Target::Mounted(path) => {
            command.args(["--ioengine=libaio", "--direct=1", &format!("--filename={path}")])
        }
        Target::Rbd { image, conf } => {
            let image = format!("--rbdname={image}");
            command.env("CEPH_CONF", conf).args([
                "--ioengine=rbd",
                "--clientname=admin",
                "--pool=rbd",
                &image,
            ])
        }
        Target::VhostUser(..) => unreachable!("done without fio"),
    };
    finish(&mut command, workload, &format!("{target:?}"), time_max, interrupt)
}

/// Runs fio until it ends, and returns the results. `on` is the target in messages.
fn finish(
    command: &mut Command,
    workload: &Workload,
    on: &str,
    time_max: Duration,
    interrupt: &Interrupt,
) -> Result<Figures> {
    let mut fio = Process::start("fio", command).context("start fio")?;
    let output = fio.finish(time_max);
    interrupt.check()?;
    if !output.success() {
        bail!("fio on {on}: {:?}\n{}", output.status, output.all());
    }
    figures(&output.stdout, workload).with_context(|| format!("fio on {on} said: {}", output.stdout))
}

fn figures(report: &str, workload: &Workload) -> Result<Figures> {
    // fio's nbd engine prints a line before the JSON document.
    let document = report.find('{').map_or("", |at| &report[at..]);
    let document: Value = serde_json::from_str(document).context("fio's JSON")?;
    let job = &document["jobs"][0];
    let side = if workload.rw.ends_with("write") { &job["write"] } else { &job["read"] };
    let number = |value: &Value| value.as_f64().context("a number in fio's report");
    let latency = &side["lat_ns"];
    Ok(Figures {
        ios: side["total_ios"].as_u64().filter(|&n| n > 0).context("fio did no I/O")?,
        iops: number(&side["iops"])?,
        mean_us: number(&latency["mean"])? / 1e3,
        p99_us: number(&latency["percentile"]["99.000000"])? / 1e3,
    })
}

/// Returns true if files in `dir` can be opened with O_DIRECT and read.
pub(crate) fn direct_works(dir: &Path) -> bool {
    use rustix::fs::{Mode, OFlags};
    let path = dir.join("direct.probe");
    let made = std::fs::write(&path, [0; 4096]).is_ok();
    let opened = rustix::fs::open(&path, OFlags::RDONLY | OFlags::DIRECT, Mode::empty()).is_ok();
    let _ = std::fs::remove_file(&path);
    made && opened
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_export_is_a_job_of_one_group() {
        let uris = ["a", "b"].map(|name| format!("nbd+unix:///{name}?socket=/s"));
        let clients = Clients { uris: &uris, connections: 2, offset: 8192, size: 65536 };
        let reads = Workload { name: "r", rw: "randread", block: "4k", depth: 16, flushes: false };
        let text = job_file(&clients, &reads, Some(Duration::from_millis(300)));
        let job = |name: char, uri: &str| text.contains(&format!("[client{name}]\nuri={uri}\n"));
        assert!(job('0', &uris[0]) && job('1', &uris[1]), "{text}");
        for line in
            ["iodepth=16", "numjobs=2", "offset=8192", "size=65536", "runtime=300ms", "group_reporting"]
        {
            assert_eq!(text.lines().filter(|it| *it == line).count(), 1, "{line}: {text}");
        }
        assert!(!job_file(&clients, &reads, None).contains("time_based"));
    }
}
