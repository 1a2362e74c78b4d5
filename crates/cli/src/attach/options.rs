//! Options of block nodes on QEMU's command line. QMP does not show all options, and
//! `blockdev-reopen` resets options that the command does not repeat.

use serde_json::{Map, Value, json};

use super::graph::{Node, is_made_up};
use super::overlay::is_export;

/// Start of the names of hob's block nodes and block jobs in QEMU.
pub(super) const OWN: &str = "hob-";

/// Options of a node that hob repeats, or that have no effect on the node's data.
const REPEATED: [&str; 9] = [
    "driver",
    "node-name",
    "file",
    "backing",
    "read-only",
    "auto-read-only",
    "cache",
    "discard",
    "detect-zeroes",
];

/// Maximum number of names in a key such as `file.cache.direct`. QEMU's process controls its command
/// line, and functions call themselves once for each name.
const KEY_NAMES_MAX: usize = 64;

/// Drivers whose `blockdev-reopen` requires the name of the backing file.
const WITH_BACKING: [&str; 4] = ["qcow2", "qcow", "qed", "vmdk"];

/// Returns the options of a node from QEMU's command line, if `-blockdev` created it there.
pub(super) fn given(command_line: &[String], node: &str) -> Option<Value> {
    let given = command_line.windows(2).filter(|pair| pair[0] == "-blockdev" || pair[0] == "--blockdev");
    given.map(|pair| parse(&pair[1])).find_map(|options| find(&options, node).cloned())
}

/// Returns the options with which `-blockdev` or `-drive` opened an image on QEMU's command line.
/// The driver is absent for a `-drive`.
pub(super) fn given_image(command_line: &[String], is_image: &dyn Fn(&str) -> bool) -> Option<Value> {
    command_line.windows(2).find_map(|pair| match pair[0].as_str() {
        "-blockdev" | "--blockdev" => find_image(&parse(&pair[1]), is_image),
        "-drive" | "--drive" => of_drive(&parse(&pair[1]), is_image),
        _ => None,
    })
}

/// Returns the options with this image, at any depth.
fn find_image(options: &Value, is_image: &dyn Fn(&str) -> bool) -> Option<Value> {
    if options["filename"].as_str().is_some_and(is_image) {
        let mut found = options.clone();
        if options.get("node-name").is_none() {
            // QEMU's default for a node inside the options of another node.
            found.as_object_mut()?.entry("discard").or_insert_with(|| "unmap".into());
        }
        return Some(found);
    }
    options.as_object()?.values().find_map(|value| find_image(value, is_image))
}

/// Returns the options of the file node of a `-drive`, if it has this image.
fn of_drive(drive: &Value, is_image: &dyn Fn(&str) -> bool) -> Option<Value> {
    let file = drive["file"].as_str().or_else(|| drive["file"]["filename"].as_str())?;
    if !is_image(file) {
        return None;
    }
    let cache = &drive["cache"];
    let is_direct = matches!(cache.as_str(), Some("none" | "directsync")) || cache["direct"] == true;
    let mut options = json!({
        "filename": file,
        "discard": "unmap",
        "cache": { "direct": is_direct, "no-flush": *cache == "unsafe" },
    });
    if let Some(aio) = drive.get("aio") {
        options["aio"] = aio.clone();
    }
    Some(options)
}

/// Returns true if QEMU's command line has a `-drive` with this file that passes the guest's
/// discards to the file.
pub(super) fn drive_discards(command_line: &[String], file: &str) -> bool {
    let mut drives = command_line.iter().filter(|text| text.contains("discard=")).map(|text| parse(text));
    drives.any(|drive| drive["file"] == file && passes_discards(&drive))
}

/// Returns true if QEMU's command line has a `-drive` with this NBD export that passes the guest's
/// discards to the export.
pub(super) fn export_discards(command_line: &[String], export: &str) -> bool {
    let ends = [format!("export={export}"), format!(":exportname={export}")];
    let names_it = |part: &str| {
        let value = part.split_once('=').map_or(part, |(_, value)| value);
        is_export(value, export) || ends.iter().any(|end| part.ends_with(end.as_str()))
    };
    let mut drives = command_line.iter().filter(|text| text.contains("nbd") && text.split(',').any(names_it));
    drives.any(|text| passes_discards(&parse(text)))
}

fn passes_discards(drive: &Value) -> bool {
    matches!(drive["discard"].as_str(), Some("unmap" | "on"))
}

/// Parses options in JSON, or as `key=value,…`. Returns null for options that are too deep.
fn parse(text: &str) -> Value {
    if text.trim_start().starts_with('{') {
        return serde_json::from_str(text).unwrap_or_default();
    }
    let mut options = json!({});
    let parts = text.replace(",,", "\0");
    for (index, part) in parts.split(',').enumerate() {
        let part = part.replace('\0', ",");
        let (key, value) = match part.split_once('=') {
            Some((key, value)) => (key.to_owned(), value.to_owned()),
            None if index == 0 => ("driver".to_owned(), part),
            None => continue,
        };
        if key.split('.').nth(KEY_NAMES_MAX).is_some() {
            return Value::Null;
        }
        let value = match (key.as_str(), value.as_str()) {
            (
                "filename" | "node-name" | "driver" | "file" | "backing" | "discard" | "detect-zeroes"
                | "aio" | "locking",
                _,
            ) => Value::String(value),
            (_, "on" | "true") => Value::Bool(true),
            (_, "off" | "false") => Value::Bool(false),
            (_, number) => number.parse::<u64>().map_or(Value::String(value.clone()), Value::from),
        };
        let mut place = &mut options;
        for step in key.split('.') {
            if !place.is_object() {
                *place = json!({});
            }
            place = &mut place[step];
        }
        *place = value;
    }
    options
}

/// Returns the options with this node's name, at any depth.
fn find<'a>(options: &'a Value, node: &str) -> Option<&'a Value> {
    if options["node-name"] == node {
        return Some(options);
    }
    options.as_object()?.values().find_map(|value| find(value, node))
}

/// Returns an option of a node that hob cannot repeat when it opens the node again. Without the
/// offset of a raw image in its file, for example, the node would have other data.
pub(super) fn not_repeatable(node: &Node) -> Option<String> {
    // QEMU shows JSON instead of a file name that cannot express all options.
    let options: Value = serde_json::from_str(node.file.strip_prefix("json:")?).ok()?;
    let mut names = options.as_object()?.keys().filter_map(|key| key.split('.').next());
    names.find(|name| !REPEATED.contains(name)).map(str::to_owned)
}

/// Returns the options that QMP shows for a node.
fn shown(node: &Node) -> Map<String, Value> {
    let info = |pointer: &str| node.info.pointer(pointer).cloned().unwrap_or_default();
    let mut options = Map::new();
    options.insert("driver".into(), json!(node.driver));
    options.insert("read-only".into(), info("/ro"));
    options.insert(
        "cache".into(),
        json!({ "direct": info("/cache/direct"), "no-flush": info("/cache/no-flush") }),
    );
    options
}

/// Returns the options that open an image file like the present node. `name` is for the new node.
pub(super) fn of_image(node: &Node, file: &str, current: &str, name: &str, command_line: &[String]) -> Value {
    let given = given(command_line, current).and_then(|options| options.as_object().cloned());
    let mut options = given.unwrap_or_else(|| shown(node));
    options.insert("node-name".into(), json!(name));
    options.insert("filename".into(), json!(file));
    Value::Object(options)
}

/// Returns the options that reopen a format node unchanged, but without its `file`. `backing` is
/// the node of its backing file.
pub(super) fn of_parent(name: &str, node: &Node, backing: Option<&str>, command_line: &[String]) -> Value {
    let given = given(command_line, name).and_then(|options| options.as_object().cloned());
    let mut options = given.unwrap_or_else(|| {
        let mut options = shown(node);
        options.insert("detect-zeroes".into(), node.info["detect_zeroes"].clone());
        options
    });
    options.insert("node-name".into(), json!(name));
    options.remove("file");
    if WITH_BACKING.contains(&node.driver.as_str()) {
        options.insert("backing".into(), backing.map_or(Value::Null, |name| json!(name)));
    }
    Value::Object(options)
}

/// Returns the options of the node that is connected to hob.
pub(super) fn of_hob(name: &str, socket: &str, export: &str, discard: bool) -> Value {
    json!({
        "driver": "nbd",
        "node-name": name,
        "server": { "type": "unix", "path": socket },
        "export": export,
        "reconnect-delay": 300,
        "discard": if discard { "unmap" } else { "ignore" },
    })
}

/// Returns a node name for this disk, of at most 31 characters as QEMU requires.
pub(super) fn node_name(disk: &str, what: &str) -> String {
    format!("{OWN}{:08x}{what}", hash(disk) >> 32)
}

/// Returns a number that differs for different texts, except by chance (FNV-1a).
pub(super) fn hash(text: &str) -> u64 {
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, mix)
}

/// Returns the node's own name, or a new one if QEMU generated it.
pub(super) fn name_or(current: &str, disk: &str, what: &str) -> String {
    if is_made_up(current) { node_name(disk, what) } else { current.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_found_on_the_command_line() {
        let line: Vec<String> = [
            "qemu",
            "-blockdev",
            "qcow2,node-name=q,discard=unmap,cache.direct=on,file.driver=file,file.node-name=f,file.filename=/a,,b",
            "-blockdev",
            r#"{"driver":"file","node-name":"j","filename":"/c","aio":"native"}"#,
            "-blockdev",
            "file,node-name=l,filename=/l,locking=off,aio-max-batch=8",
            "-drive",
            "file=/d,format=raw,discard=unmap",
            "-drive",
            "file=/it's,, e,if=virtio,discard=on",
        ]
        .map(str::to_owned)
        .into();
        let q = given(&line, "q").unwrap();
        assert_eq!(
            (&q["driver"], &q["discard"], &q["cache"]["direct"]),
            (&json!("qcow2"), &json!("unmap"), &json!(true))
        );
        assert_eq!(given(&line, "f").unwrap()["filename"], "/a,b");
        assert_eq!(given(&line, "j").unwrap()["aio"], "native");
        let l = given(&line, "l").unwrap();
        assert_eq!((&l["locking"], &l["aio-max-batch"]), (&json!("off"), &json!(8)));
        assert_eq!(given(&line, "x"), None);
        assert!(drive_discards(&line, "/d") && !drive_discards(&line, "/c"));
        assert!(drive_discards(&line, "/it's, e"), "a comma in a name is doubled");
    }

    #[test]
    fn the_options_of_an_image_are_found_by_its_file() {
        for (option, value, expected) in [
            ("-blockdev", "driver=file,node-name=f,filename=/a,aio=native", Some((json!("f"), Value::Null))),
            (
                "-blockdev",
                "driver=raw,node-name=r,file.driver=file,file.filename=/a",
                Some((Value::Null, json!("unmap"))),
            ),
            (
                "-blockdev",
                r#"{"driver":"host_device","node-name":"j","filename":"/a","discard":"ignore"}"#,
                Some((json!("j"), json!("ignore"))),
            ),
            ("-drive", "if=none,id=d,file=/a,format=raw", Some((Value::Null, json!("unmap")))),
            ("-drive", "if=none,id=d,file=/b,format=raw", None),
            ("-blockdev", "driver=file,node-name=f,filename=/b", None),
            ("-name", "driver=file,node-name=f,filename=/a", None),
        ] {
            let line = ["qemu", option, value].map(str::to_owned);
            let found = given_image(&line, &|file: &str| file == "/a");
            let found = found.map(|options| (options["node-name"].clone(), options["discard"].clone()));
            assert_eq!(found, expected, "{option} {value}");
        }
    }

    /// The process whose command line hob reads may be hostile.
    #[test]
    fn options_that_are_too_deep_are_ignored() {
        let given = |names: usize| {
            let deep = "file.".repeat(names - 1);
            let value = format!("driver=raw,{deep}filename=/a");
            given_image(&["qemu", "-blockdev", &value].map(str::to_owned), &|file: &str| file == "/a")
        };
        assert!(given(KEY_NAMES_MAX).is_some());
        for names in [KEY_NAMES_MAX + 1, 26_000] {
            assert_eq!(given(names), None, "{names}");
        }
    }

    #[test]
    fn drives_with_an_nbd_export_and_discards_are_found() {
        for (drive, expected) in [
            ("file=nbd+unix:///web-vda?socket=/run/hob/nbd.sock,format=raw,discard=unmap", true),
            ("file=nbd+unix:///web-vda?socket=/s,file.reconnect-delay=300,discard=unmap", true),
            ("file=nbd:unix:/run/hob/nbd.sock:exportname=web-vda,discard=on", true),
            ("driver=raw,file.driver=nbd,file.path=/s,file.export=web-vda,discard=unmap", true),
            ("file=nbd+unix:///web-vda?socket=/run/hob/nbd.sock,format=raw", false),
            ("file=nbd+unix:///web-vda2?socket=/run/hob/nbd.sock,discard=unmap", false),
            ("file=/images/web-vda,format=raw,discard=unmap", false),
        ] {
            let line = ["qemu", "-drive", drive].map(str::to_owned);
            assert_eq!(export_discards(&line, "web-vda"), expected, "{drive}");
        }
    }

    #[test]
    fn a_reopened_node_keeps_its_backing_file() {
        let node = |driver: &str| Node {
            driver: driver.into(),
            file: "/a".into(),
            info: json!({ "ro": false, "detect_zeroes": "off", "cache": { "direct": true, "no-flush": false } }),
        };
        let options = of_parent("q", &node("qcow2"), Some("base"), &[]);
        assert_eq!(options["backing"], "base");
        assert_eq!(options["cache"]["direct"], true);
        assert_eq!(of_parent("q", &node("qcow2"), None, &[])["backing"], Value::Null);
        assert!(of_parent("r", &node("raw"), None, &[]).get("backing").is_none());
    }

    #[test]
    fn options_that_change_the_data_of_a_node_are_recognized() {
        let node = |file: &str| Node { driver: "raw".into(), file: file.into(), info: json!({}) };
        let with = |more: &str| {
            format!(r#"json:{{"driver":"raw",{more}"file":{{"driver":"file","filename":"/a"}}}}"#)
        };
        for (file, expected) in [
            ("/a".to_owned(), None),
            (with(""), None),
            (with(r#""cache.direct":true,"#), None),
            (with(r#""offset":1048576,"#), Some("offset")),
            (with(r#""encrypt.key-secret":"s","#), Some("encrypt")),
        ] {
            assert_eq!(not_repeatable(&node(&file)).as_deref(), expected, "{file}");
        }
    }

    #[test]
    fn names_of_nodes_are_short() {
        assert!(node_name(&"x".repeat(64), "-image").len() <= 31);
        assert_ne!(node_name("a", ""), node_name("b", ""));
    }
}
