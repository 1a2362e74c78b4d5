//! Accepted and refused command lines.

use super::*;

fn parse(line: &str) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(line.split_whitespace())
}

#[test]
fn the_definition_is_consistent() {
    clap_command().debug_assert();
}

/// An outage of an object store fails thousands of requests, and hob reports it once.
#[test]
fn single_attempts_of_object_stores_are_not_logged() {
    use tracing::Level;

    let filter = tracing_subscriber::EnvFilter::builder().parse(LOG_FILTER).unwrap();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::sink).finish();
    tracing::subscriber::with_default(log, || {
        assert!(!tracing::enabled!(target: "object_store::client::retry", Level::INFO));
        assert!(tracing::enabled!(target: "object_store::client::retry", Level::WARN));
        assert!(tracing::enabled!(target: "hob_daemon", Level::INFO));
    });
}

#[test]
fn these_lines_make_sense() {
    for line in [
        "hob serve --disk X --listen unix:/p.sock",
        "hob serve --disk X --listen tcp:127.0.0.1:0 --listen unix:/p --name vm --read-only",
        "hob serve --disk nbd://h/e --pool F --size 64M --block-size 8K --policy lru --listen unix:/p.sock \
         --ring threads --control unix:/c.sock --force",
        "hob daemon --config hob.toml",
        "hob objects create objects+file:///srv/vm --size 10G --object-size 1M",
        "hob objects show s3://bucket/vm -o json",
        "hob objects unlock gs://bucket/vm",
        "hob objects unlock gs://bucket/vm --dry-run",
        "hob objects unlock gs://bucket/vm --yes",
        "hob pool create fast /dev/a /dev/b --size 1G --segment-size 16M --force",
        "hob pool add-device fast /dev/c --size 1G",
        "hob pool set-device fast /dev/c --admission out",
        "hob pool remove-device fast /dev/c",
        "hob pool remove fast",
        "hob pool list -o json",
        "hob --control tcp:h:1 --token-file /t pool show fast",
        "hob disk add vm --backing /vm.img --read-only",
        "hob disk remove vm",
        "hob disk list",
        "hob disk show vm",
        "hob cache enable vm --pool fast --size 64M --block-size 4K --policy s3-fifo",
        "hob cache resize vm 128M",
        "hob cache set vm --block-size 8K --policy fifo",
        "hob cache set vm --mode write-around",
        "hob cache set vm --preset zbs --persistent --ordered --copies 2-dirty --layout split:70 --dirty-age-max 0",
        "hob cache set vm --persistent false --ordered false --fill auto --admission nth-access:3+not-sequential:512K",
        "hob cache enable vm --pool fast --size 64M --preset fast-cache --dirty-start 20 --dirty-stop 10 --dirty-full 90",
        "hob cache enable vm --pool fast --size 64M --mode write-back --destage-order coldest --block-size 64K",
        "hob cache disable vm --discard-dirty",
        "hob disk remove vm --discard-dirty",
        "hob cache discard-dirty vm --yes",
        "hob cache discard-dirty vm --dry-run",
        "hob cache clear vm --dry-run",
        "hob disk remove vm --force --dry-run",
        "hob disk set vm --read-only on --datastore array --vhost-user /s --fuse /f --device off --dry-run",
        "hob disk event vm snapshot-revert --yes",
        "hob cache export-dirty vm rescue.img",
        "hob cache adopt vm 0123456789abcdef0123456789abcdef",
        "hob disk add vm --backing vm.img --adopt-cache 0123456789abcdef0123456789abcdef",
        "hob pool discard-orphan fast 0123456789abcdef0123456789abcdef --yes",
        "hob attach qmp:/run/vm.qmp",
        "hob attach libvirt:web vda --pool fast --size 4G --preset auto --method mirror --dry-run",
        "hob attach --list -o json",
        "hob detach qmp:/run/vm.qmp /srv/web.qcow2 --stopped",
        "hob drain vm",
        "hob drain vm --stop",
        "hob drain vm --no-wait -o json",
        "hob serve --disk X --pool F --size 64M --preset auto --drain-on-shutdown --listen unix:/p.sock",
        "hob cache clear vm",
        "hob cache disable vm",
        "hob stats",
        "hob top",
        "hob health -o json",
        "hob pool create p /d --flash-writes 500G/day",
        "hob pool set p --flash-writes off",
        "hob lab sim t --size 1G --flash-writes 1DWPD,off",
        "hob pool remove-device p /d --dry-run",
        "hob pool discard-orphan p o --dry-run --yes",
        "hob cluster take vm --force --yes",
        "hob cluster move vm --to b --dry-run",
        "hob migrate vm --to h:1 --cache drop --dry-run",
        "hob migrate vm --take-back --force --yes",
        "hob top -b --interval 0.5 --sort p99 -o json --log-format json",
        "hob stats vm --control unix:/c.sock",
        "hob explain vm --log debug",
        "hob advise vm",
        "hob advise vm --target-hit 85% --endurance 3DWPD --reset -o json",
        "hob histogram vm",
        "hob histogram vm --kind seek --kind length --class writes --csv - --reset -o json",
        "hob replay t.hob --target nbd://h/e",
        "hob replay t.csv --target /dev/x --pace x0.5 --depth 32 --allow-writes --wrap --direct --from 60 --limit 9",
        "hob replay t --target f --pace asap --reads-only --disk 3 -o json",
        "hob record vm --out t.hob --seconds 60 --requests 1000 --format csv",
        "hob lab import in.csv.gz out.trace --format msr --disk 3 --on-bad fail --to csv --force",
        "hob lab import - -",
        "hob lab info trace --page-size 4K -o json",
        "hob lab info trace --picture rate.svg",
        "hob lab formats",
        "hob lab advise trace --target-hit 85% --backing fixed:8,2.5 --flash pcie --endurance 0.3DWPD --html a.html",
        "hob lab latency t --no-cache",
        "hob lab latency t --size 4G --preset zbs --dirty-start 30 --copies 1",
        "hob lab latency t --size 4G --mode write-back --layout split:70 --block-size 64K",
        "hob lab latency t --size 4G --policy lru --pace x0.5 --warm --limit 1000 --csv a.csv --picture a.svg -o json",
        "hob lab figures",
        "hob lab figures dss block-size --out d --threads 2 --quick -o json",
        "hob lab figures Cargo.toml ./src --share auto,one-lru --share static --size 1%,64M --segment-size 64K",
        "hob lab figures - --duration 60 --policy lru --admission ghost --block-size 8K --format csv --out d",
        "hob lab share t u --share optimum --threads 2 --csv a.csv",
        "hob lab sim t u --share auto --size 1% --threads 2 --csv a.csv",
        "hob lab mrc t u v --share auto,optimum --block-size 8K --csv a.csv",
        "hob lab advise t u --share static --target-hit 85%",
        "hob lab mrc t",
        "hob lab mrc t --block-size 4K,64K --mode write-back --exact --target-hit 95% --csv a.csv --picture a.svg -o json",
        "hob lab mrc - --sample 0.01 --mode write-around",
        "hob lab mrc t --samples 16384",
        "hob lab generate",
        "hob lab generate --list -o json",
        "hob lab generate zipf requests=1000 theta=0.8 --out t --to csv --requests 500 --force",
        "hob lab sim t.csv --policy all --size 1G,10% --block-size 4K,64K --admission nth-access:3+not-sequential:512K",
        "hob lab sim t --preset vfrc --sample 0.1 --threads 1 --csv a.csv --picture a.svg -o json",
        "hob completions bash",
        "hob man --out /tmp/x",
        "hob docs --out docs --check",
        "hob demo",
    ] {
        if let Err(error) = parse(line) {
            panic!("{line}: {error}");
        }
    }
}

#[test]
fn these_lines_are_refused_with_one_line_that_suggests_a_fix() {
    for (line, part) in [
        ("hob serve --disk X", "--listen"),
        ("hob serve --listen unix:/p", "--disk"),
        ("hob serve --disk X --listen /p.sock", "unix:"),
        ("hob serve --disk X --listen unix:/p --size 1G", "--pool"),
        ("hob serve --disk X --listen unix:/p --pool f", "--size"),
        ("hob serve --disk X --listen unix:/p --ring best", "io_uring"),
        ("hob pool create fast", "DEVICE"),
        ("hob pool create fast /d --size lots", "64M"),
        ("hob pool set-device fast /d", "--admission"),
        ("hob pool set-device fast /d --admission maybe", "in, out"),
        ("hob cache set vm", "--block-size"),
        ("hob cache enable vm --pool p --size 1G --policy best", "s3-fifo"),
        ("hob cache set vm --mode write-off", "write-back"),
        ("hob cache set vm --preset emc", "fast-cache"),
        ("hob cache set vm --layout split:100", "split:PERCENT"),
        ("hob cache set vm --admission some", "nth-access:N"),
        ("hob cache set vm --fill blocks", "sectors, block, auto"),
        ("hob cache set vm --copies 3", "2-dirty"),
        ("hob cache set vm --dirty-start 101", "100"),
        ("hob cache set vm --dirty-full 0", "1"),
        ("hob qos set vm --limit none", "0 means no limit"),
        ("hob qos set vm --flash-limit none", "0 means no limit"),
        ("hob qos set vm --bytes-limit none", "0 means no limit"),
        ("hob qos policy set gold --reservation none", "0 means no reservation"),
        ("hob drain", "DISK"),
        ("hob drain vm --stop --no-wait", "--no-wait"),
        ("hob cash", "cash"),
        ("hob tasks acknowledge zz", "a number such as 7"),
        ("hob stats -o yaml", "json"),
        ("hob explain", "DISK"),
        ("hob record vm", "--out"),
        ("hob replay t.hob", "--target"),
        ("hob replay t --target f --pace fast", "asap"),
        ("hob replay t --target f --allow-writes --reads-only", "--reads-only"),
        ("hob record vm --out t --seconds 0", "0"),
        ("hob lab import t", "OUT"),
        ("hob lab info t --format best", "blkparse"),
        ("hob lab info t --disk 65536", "65535"),
        ("hob pool set p", "--flash-writes"),
        ("hob pool set p --flash-writes 500G", "500G/day"),
        ("hob advise vm --target-hit 120%", "85%"),
        ("hob histogram vm --kind queue", "outstanding"),
        ("hob lab advise t --target-hit 120%", "85%"),
        ("hob lab advise t --backing floppy", "15k-raid5"),
        ("hob lab advise t --endurance 5", "600TBW"),
        ("hob lab latency t", "--size"),
        ("hob lab latency t --size 1G --policy best", "s3-fifo"),
        ("hob lab latency t --size 1G --no-cache", "--no-cache"),
        ("hob lab latency t --no-cache --mode write-back", "--no-cache"),
        ("hob lab latency t --size 1G --preset emc", "fast-cache"),
        ("hob lab figures dds", "block-size, dss, dss-types"),
        ("hob lab figures dss --share best", "static, auto, one-lru, optimum"),
        ("hob lab share t --share best", "static, auto, one-lru, optimum"),
        ("hob lab sim t --share best", "static, auto, one-lru, optimum"),
        ("hob lab mrc t --share best", "static, auto, one-lru, optimum"),
        ("hob lab advise t --share best", "static, auto, one-lru, optimum"),
        ("hob lab sim t u", "--share"),
        ("hob lab mrc t u", "--share"),
        ("hob lab advise t u", "--share"),
        ("hob lab sim t --share auto --picture a.svg", "--picture"),
        ("hob lab mrc t --share auto --exact", "--exact"),
        ("hob lab advise t --share auto --html a.html", "--html"),
        ("hob lab mrc", "TRACE"),
        ("hob lab mrc t --mode write-off", "write-back"),
        ("hob lab mrc t --sample 2", "0.01"),
        ("hob lab mrc t --samples 16385", "16384"),
        ("hob lab mrc t --samples 1000 --exact", "--exact"),
        ("hob lab mrc t --target-hit 0.9", "90%"),
        ("hob lab generate zipf", "--out"),
        ("hob lab generate zipf --list", "--list"),
    ] {
        let error = parse(line).unwrap_err();
        let said = usage_line(&error.to_string());
        assert!(said.contains(part), "{line}: {said}");
        assert!(said.contains("--help'") && !said.contains('\n'), "{line}: {said}");
    }
}

#[test]
fn causes_are_said_once() {
    let cause = std::io::Error::other("the disk is full");
    let error = anyhow::Error::from(cause).context("cannot save: the disk is full").context("cannot start");
    assert_eq!(with_causes(&error), "cannot start: cannot save: the disk is full");
}
