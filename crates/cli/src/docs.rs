//! `hob docs --out DIR [--check]`: the pages of docs/ that are generated from the program.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use hob_control::{EVENTS, EventInfo};
use hob_engine::admission::ADMISSIONS;
use hob_engine::command::{Copies, Mode};
use hob_engine::granularity::FILLS;
use hob_engine::outcome::OUTCOMES;
use hob_engine::policy::POLICIES;
use hob_engine::preset::{COPIES, DESTAGE_ORDERS, LAYOUTS, MODES, OneDevice, PRESETS, VERIFY, Word};
use hob_engine::vscsi::{METRICS, NEAREST_OF};

/// Write the generated pages of the documentation
#[derive(Debug, Args)]
pub(crate) struct Docs {
    /// Directory
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Write nothing; fail if a page is not current
    #[arg(long)]
    check: bool,
}

pub(super) fn run(args: &Docs) -> anyhow::Result<()> {
    let pages = [
        ("cli.md", cli_page()),
        ("histograms.md", histograms_page()),
        ("metrics.md", format!("{GENERATED}{}", hob_daemon::metrics_page())),
        ("openapi.json", hob_daemon::openapi_json()),
        ("LIFECYCLE.md", lifecycle_page()),
        ("outcomes.md", outcomes_page()),
        ("policies.md", policies_page()),
        ("presets.md", presets_page()),
    ];
    let mut stale = Vec::new();
    if !args.check {
        std::fs::create_dir_all(&args.out).with_context(|| format!("cannot make {}", args.out.display()))?;
    }
    for (name, text) in pages {
        let path = args.out.join(name);
        if !args.check {
            std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        } else if std::fs::read_to_string(&path).ok().as_ref() != Some(&text) {
            stale.push(path.display().to_string());
        }
    }
    if !stale.is_empty() {
        bail!("not up to date: {}; run 'hob docs --out {}'", stale.join(", "), args.out.display());
    }
    Ok(())
}

const GENERATED: &str = "<!-- Written by `hob docs`; do not edit. -->\n";

fn cli_page() -> String {
    let mut root = super::clap_command();
    root.build();
    let mut page = format!("{GENERATED}# Command line\n");
    let global: Vec<&clap::Arg> = root.get_arguments().filter(|arg| arg.is_global_set()).collect();
    page.push_str("\nFor users of the command `hob`. Each command has these options.\n\n");
    write_arguments(&mut page, &global);
    for command in root.get_subcommands().filter(|command| !command.is_hide_set()) {
        write_command(&mut page, command, "hob");
    }
    page
}

fn histograms_page() -> String {
    let mut page = format!(
        "{GENERATED}# Histograms\n\n\
         For operators who want to know the I/O pattern of a disk.\n\n\
         `hob histogram DISK` and `GET /v1/disks/{{disk}}/histograms` show the I/O pattern of a disk in six histograms. The \
         buckets are those of vscsiStats (Ahmad, \"Easy and efficient disk I/O workload characterization in VMware ESX \
         server\", IISWC 2007). hob always collects the histograms. Each histogram exists three times: for all reads and \
         writes, for reads, and for writes. The histograms of reads ignore writes: for example, a seek distance is measured \
         from the previous read, and only reads in flight are counted. The histograms of writes ignore reads.\n\n\
         hob counts the reads and writes of guests, except refused ones. Lengths, distances, intervals and requests in flight \
         are counted when a request arrives; latencies are counted when hob replies. The first request has no distance and no \
         interval. A recording (`hob record`) has the same information, except latencies and requests in flight.\n\n\
         `hob histogram DISK --reset`, or `DELETE` of the same path, clears the histograms, but not `hob stats`. The \
         histograms are available as CSV with `--csv FILE`, `?format=csv` or `Accept: text/csv`.\n\n\
         A bound is the largest value of its bucket; the last bucket has all larger values.\n\n\
         | metric | what it is | unit | bounds |\n|---|---|---|---|\n"
    );
    for row in METRICS {
        let bounds: Vec<String> = row.bounds.iter().map(ToString::to_string).collect();
        let _ = writeln!(page, "| `{}` | {} | {} | {} |", row.name, row.title, row.unit, bounds.join(", "));
    }
    let _ = write!(
        page,
        "\nA distance is measured from the last sector of one request to the first sector of the next. The distance is 1 if the next request \
         starts directly after the last sector, and 0 or less if the next request starts before that. `seek-nearest` uses the nearest of the {NEAREST_OF} previous \
         requests, so several concurrent sequential streams are recognised as sequential. Times are rounded up to whole \
         microseconds. `outstanding` does not count the request itself.\n"
    );
    page
}

fn write_command(page: &mut String, command: &clap::Command, parent: &str) {
    let name = format!("{parent} {}", command.get_name());
    let shown = |arg: &&clap::Arg| {
        !arg.is_global_set() && !arg.is_hide_set() && !matches!(arg.get_id().as_str(), "help" | "version")
    };
    let children: Vec<_> = command.get_subcommands().filter(|child| !child.is_hide_set()).collect();
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let heading = if parent == "hob" { "##" } else { "###" };
    let _ = write!(page, "\n{heading} {name}\n\n{about}.\n");
    if children.is_empty() {
        let usage = command.clone().render_usage().to_string();
        let _ = write!(page, "\n```\n{}\n```\n", usage.trim_start_matches("Usage: "));
        let arguments: Vec<_> = command.get_arguments().filter(shown).collect();
        if !arguments.is_empty() {
            page.push('\n');
            write_arguments(page, &arguments);
        }
    }
    for child in children {
        write_command(page, child, &name);
    }
}

fn write_arguments(page: &mut String, arguments: &[&clap::Arg]) {
    page.push_str("| argument | meaning |\n|---|---|\n");
    for arg in arguments {
        let values = arg.get_value_names().unwrap_or_default().iter().map(|name| format!("<{name}>"));
        let values = if arg.get_action().takes_values() {
            values.collect::<Vec<_>>().join(" ")
        } else {
            String::new()
        };
        let long = arg.get_long().map(|long| format!("--{long}"));
        let short = arg.get_short().map(|short| format!("-{short}"));
        let flag = [short, long].into_iter().flatten().collect::<Vec<_>>().join(", ");
        let name = format!("{flag} {values}");
        let mut help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let possible = arg.get_possible_values();
        if arg.get_action().takes_values() && !possible.is_empty() {
            let names: Vec<_> = possible.iter().map(|value| format!("`{}`", value.get_name())).collect();
            let _ = write!(help, " ({})", names.join(", "));
        }
        let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
        if arg.get_action().takes_values() && !defaults.is_empty() {
            let _ = write!(help, " [default: {}]", defaults.join(", "));
        }
        let _ = writeln!(page, "| `{}` | {} |", name.trim(), help.replace('|', "\\|"));
    }
}

fn lifecycle_page() -> String {
    let mut page = format!(
        "{GENERATED}# Suspends, snapshots and restarts\n\nFor administrators whose VMs are suspended or restored from snapshots.\n\n\
         Some events of a VM affect the caches of its disks. hob cannot see these events, so a hook of the\n\
         hypervisor must report them. You need such a hook if your VMs are suspended, or if you take\n\
         snapshots of their backings. hob has hooks for libvirt and Proxmox VE\n\
         ([MIGRATION.md](MIGRATION.md)).\n\n\
         ```console\n\
         # hob disk event web snapshot-create              # before a snapshot of the backing\n\
         # hob disk event web snapshot-revert --dry-run    # what would be lost?\n\
         ```\n\n\
         In the API, `POST /v1/disks/DISK/events` reports an event. The command returns when the cache is\n\
         drained or emptied. Meanwhile `hob disk show` shows the progress of a drain.\n\n\
         An event that discards dirty data fails if there is such data, and states the amount. To discard\n\
         the data, add `--yes` (API: `\"discard_dirty\": true`).\n\n\
         | event | volatile cache (`vfrc`) | persistent cache (all other presets) | when to report it, and why |\n\
         |---|---|---|---|\n"
    );
    for EventInfo { name, of_volatile, of_persistent, sentence, .. } in EVENTS {
        let (volatile, persistent) = (of_volatile.words(), of_persistent.words());
        let _ = writeln!(page, "| `{name}` | {volatile} | {persistent} | {sentence} |");
    }
    page.push_str(
        "\n\
         Volatile caches behave as in vSphere Flash Read Cache: hob empties them at a cold restart, at a\n\
         resume, and when a snapshot is consolidated or reverted. If you override the setting `persistent` of\n\
         a preset, your value decides whether the cache is volatile.\n\n\
         A snapshot must be reverted *in place*: the same file or volume gets other contents, and nothing\n\
         writes to it meanwhile. hob also writes to it: it destages dirty data while the VM is stopped. So\n\
         drain the disk between the stop of the VM and the revert:\n\n\
         ```console\n\
         # hob disk event web suspend          # after the VM is stopped, before the revert\n\
         # hob disk event web snapshot-revert  # after the revert, before the VM continues\n\
         ```\n\n\
         Without the drain, hob can write dirty data over the reverted contents until it receives\n\
         `snapshot-revert`. The disk then has a mixture of both, and hob cannot report that. If the drain\n\
         cannot end, discard the dirty data instead: `hob cache discard-dirty web --yes`.\n\n\
         In two cases, remove the disk before the revert (`hob disk remove`) and add it afterwards:\n\n\
         * The snapshot becomes another file.\n\
         * The disk is an image that hob opens through `qemu-nbd`.\n\n\
         A persistent cache then detects that its backing changed, and uses none of its old data\n\
         ([FAULTS.md](FAULTS.md)). The cache also detects a revert that happened while\n\
         hob was down.\n",
    );
    page
}

fn outcomes_page() -> String {
    let mut page = format!(
        "{GENERATED}# Outcomes\n\nFor operators who read `hob explain`, `hob stats` or the metrics.\n\nEach request of a guest has exactly one \
         outcome. An outcome consists of a class and, for some classes, a reason.\n\nRequests that the guest's protocol does not allow, such as one outside the disk or a write to a read-only export, \
         get an error from the NBD, vhost-user or FUSE front end. They have no outcome, and no statistics count them.\n\n| class | reason | the requests … |\n|---|---|---|\n"
    );
    for row in OUTCOMES {
        let reason = if row.reason.is_empty() { String::new() } else { format!("`{}`", row.reason) };
        let _ = writeln!(page, "| `{}` | {reason} | {} |", row.class, row.sentence);
    }
    page
}

fn policies_page() -> String {
    let mut page = format!(
        "{GENERATED}# Replacement policies\n\nFor operators who tune a cache. A policy chooses the block to evict when the cache needs a free block. The first policy is the \
         default.\n\n\
         | name | what it does | source | runs in |\n|---|---|---|---|\n"
    );
    for row in POLICIES {
        let place = if row.serves {
            "daemon and lab"
        } else {
            "lab only: needs more than 24 bytes of memory for each block"
        };
        let _ = writeln!(page, "| `{}` | {} | {} | {place} |", row.name, row.summary, row.source);
    }
    page.push_str(
        "\n# Admission\n\nAn admission rule decides which blocks enter the cache: `--admission` of `hob cache enable`, `hob cache set` and `hob serve`. \
         `hob lab sim` simulates the rules.\n\n\
         | form | what it does |\n|---|---|\n",
    );
    for row in ADMISSIONS {
        let _ = writeln!(page, "| `{}` | {} |", row.form, row.summary);
    }
    page.push_str(
        "\n# Fill granularity\n\nThe setting `fill` (`--fill`) decides how much a read miss brings into the cache. `hob lab sim --fill` simulates the setting.\n\n\
         | fill | what it does |\n|---|---|\n",
    );
    for row in FILLS {
        let _ = writeln!(page, "| `{}` | {} |", row.name, row.summary);
    }
    page
}

fn presets_page() -> String {
    let mut page = format!(
        "{GENERATED}# Presets\n\nFor operators who choose the settings of a cache.\n\nA preset is a named set of cache settings. You can override each \
         setting: `hob cache enable --preset zbs --dirty-start 30`, or the same names in hob.toml. A cache without a preset \
         has the settings of `vfrc`. The memory tier above a cache (`--ram`) is not part of a preset. An array with FAST Cache \
         has a cache in DRAM too: `--preset fast-cache --ram 4G` corresponds to such an array.\n\n\
         | preset | mode | persistent | layout | block | admission | fill | policy | destage | start, stop, full (dirty blocks) | maximum age | \
         copies |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    );
    for row in PRESETS {
        let destage = &row.destage;
        let percent = |permille: u16| format!("{} %", permille / 10);
        let (order, shares, age) = if row.mode == Mode::WriteBack {
            let shares = [destage.start_permille, destage.stop_permille, destage.full_permille].map(percent);
            let age = match destage.dirty_age_ms_max {
                0 => "none".to_owned(),
                millis => format!("{} s", millis / 1000),
            };
            (format!("`{}`", destage.order), shares.join(", "), age)
        } else {
            ("–".to_owned(), "–".to_owned(), "–".to_owned())
        };
        let _ = writeln!(
            page,
            "| `{}` | `{}` | {} | `{}` | {} | `{}` | `{}` | `{}` | {order} | {shares} | {age} | `{}` |",
            row.name,
            row.mode,
            if row.persistent { "yes" } else { "no" },
            row.layout,
            hob_control::Size(u64::from(row.block_bytes)),
            row.admission,
            row.fill,
            row.policy,
            row.copies
        );
    }
    page.push('\n');
    for row in PRESETS {
        let alone = match (row.copies, row.one_device) {
            (Copies::One, _) => "",
            (_, OneDevice::OneCopy) => " In a pool of one device, it has one copy.",
            (_, OneDevice::Refused) => " It needs two flash devices.",
        };
        let _ = writeln!(page, "- `{}`: {}. {}: {}.{alone}", row.name, row.summary, row.source, row.notes);
    }
    write_words(&mut page, "Modes", "The mode decides what a cache does with writes.", MODES);
    write_words(&mut page, "Layouts", "The layout decides which blocks reads and writes use.", LAYOUTS);
    write_words(
        &mut page,
        "Destage orders",
        "Order in which dirty data is written to the backing.",
        DESTAGE_ORDERS,
    );
    write_words(
        &mut page,
        "Copies",
        "Number of copies of cached data on flash. Two copies need a persistent cache.",
        COPIES,
    );
    write_words(
        &mut page,
        "Verify",
        "Restarts after which hob compares a persistent cache with its backing before it serves the cached data. Not part of a preset.",
        VERIFY,
    );
    page
}

fn write_words<T>(page: &mut String, heading: &str, about: &str, words: &[Word<T>]) {
    let _ = write!(page, "\n## {heading}\n\n{about}\n\n| name | meaning |\n|---|---|\n");
    for row in words {
        let _ = writeln!(page, "| `{}` | {} |", row.name, row.summary);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_written_and_then_up_to_date() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("docs");
        assert!(run(&Docs { out: out.clone(), check: true }).is_err());
        run(&Docs { out: out.clone(), check: false }).unwrap();
        run(&Docs { out: out.clone(), check: true }).unwrap();
        std::fs::write(out.join("policies.md"), "old").unwrap();
        let error = run(&Docs { out, check: true }).unwrap_err().to_string();
        assert!(error.contains("policies.md") && !error.contains("cli.md"), "{error}");
    }

    #[test]
    fn the_page_of_commands_names_all_of_them_and_their_arguments() {
        let page = cli_page();
        for part in
            ["## hob serve", "### hob pool remove-device", "--block-size <SIZE>", "`s3-fifo`", "-o, --output"]
        {
            assert!(page.contains(part), "{part}\n{page}");
        }
        assert!(!page.contains("hob docs --out") && !page.contains("## hob docs"));
    }
}
