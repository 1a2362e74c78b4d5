//! Checks that every documented guest configuration survives a restart of the daemon.

use super::{none, texts};

/// Files with examples for operators.
const PLACES: [&str; 3] = ["README.md", "docs/", "packaging/"];

/// Returns the missing parts of an example.
fn broken(text: &str) -> Vec<&'static str> {
    let mut broken = Vec::new();
    // A backslash continues a command on the next line.
    for command in text.replace("\\\n", " ").lines() {
        let has_nbd_drive = ["-drive ", "-blockdev "].iter().any(|option| {
            command.split(option).skip(1).any(|rest| {
                let drive = rest.split(" -").next().unwrap_or(rest);
                drive.contains("nbd") && !drive.contains("reconnect-delay=")
            })
        });
        if has_nbd_drive {
            broken.push("a QEMU drive over NBD without reconnect-delay");
        }
        if command.contains("-chardev socket") && !command.contains("reconnect") {
            broken.push("a QEMU chardev for vhost-user without reconnect");
        }
    }
    for source in elements(text, "<source protocol='nbd'") {
        if !source.contains("<reconnect delay=") {
            broken.push("a libvirt disk over NBD without <reconnect delay=…/>");
        }
    }
    for disk in elements(text, "<source type='unix'") {
        if !disk.contains("<reconnect enabled='yes'") {
            broken.push("a libvirt vhostuser disk without <reconnect enabled='yes' …/>");
        }
    }
    broken
}

/// Returns the elements that begin with `start`, each up to the end of its source.
fn elements<'a>(text: &'a str, start: &str) -> Vec<&'a str> {
    let begins = text.match_indices(start).map(|(at, _)| &text[at..]);
    begins.map(|rest| rest.split("</source>").next().unwrap_or(rest)).collect()
}

#[test]
fn documented_guests_wait_for_a_daemon_that_is_restarted() {
    let mut found = Vec::new();
    for text in texts() {
        let is_ours = PLACES.iter().any(|place| text.path.starts_with(place));
        if is_ours {
            found.extend(broken(&text.text).into_iter().map(|what| format!("{}: {what}", text.path)));
        }
    }
    none("these examples fail guest I/O when the daemon is restarted", &found);
}

#[test]
fn examples_without_a_reconnect_are_found() {
    for (text, count) in [
        ("qemu -drive file=nbd+unix:///a?socket=/s,if=virtio", 1),
        ("qemu \\\n -drive file=nbd://h/a,file.reconnect-delay=9,if=virtio", 0),
        ("qemu -drive file=nbd://h/a,if=virtio -device x,reconnect-delay=1", 1),
        ("-blockdev driver=nbd,server.type=unix,server.path=/s", 1),
        ("-chardev socket,id=a,path=/s", 1),
        ("-chardev socket,id=a,path=/s,reconnect-ms=1000", 0),
        ("<source protocol='nbd' name='a'>\n<host/></source>", 1),
        ("<source protocol='nbd' name='a'>\n<host/><reconnect delay='9'/></source>", 0),
        ("<source type='unix' path='/s'/>", 1),
        ("<source type='unix' path='/s'><reconnect enabled='yes' timeout='1'/></source>", 0),
        ("nbdcopy nbd+unix:///a?socket=/s file", 0),
    ] {
        assert_eq!(broken(text).len(), count, "{text}");
    }
}
