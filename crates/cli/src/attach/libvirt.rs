//! The persistent definition of a libvirt domain: its next start uses hob's disk, or its image
//! again.
//!
//! Only the element of one disk changes. The rest of the XML belongs to the operator, who may edit
//! it while the disk is attached.

use std::io::Write as _;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, bail};

use super::record::Record;
use super::threads::in_thread;
use super::virsh::{self, Info, is_unknown_domain, when_reachable};

/// Source of a disk in the definition of its libvirt domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Defined {
    /// The image file, not hob. The value is the XML of the `<disk>` element.
    Image(String),
    /// hob's socket for the disk. The value is the XML of the `<disk>` element.
    Hob(String),
}

/// Returns the source of a disk in the XML of a domain.
pub(super) fn find(xml: &str, file: &Path, disk: &str) -> Option<Defined> {
    elements(xml).find_map(|element| {
        if is_hobs(element, disk) {
            return Some(Defined::Hob(element.to_owned()));
        }
        let path = source(element)?;
        is_same_path(Path::new(&path), file).then(|| Defined::Image(element.to_owned()))
    })
}

/// Returns true if both paths lead to the same file, also through symbolic links.
pub(super) fn is_same_path(one: &Path, other: &Path) -> bool {
    one == other || one.canonicalize().is_ok_and(|one| other.canonicalize().is_ok_and(|other| one == other))
}

/// Returns the element of a disk with hob as its source, on the NBD socket `socket`.
///
/// # Errors
/// Returns an error if the element has an option that a network disk cannot have.
pub(super) fn with_hob(element: &str, disk: &str, socket: &str) -> anyhow::Result<String> {
    let tag = element.split('>').next().unwrap_or_default();
    if attribute(tag, "device").is_some_and(|device| device == "lun") {
        bail!(
            "the disk has device='lun' in the domain's XML, which libvirt does not permit for a disk over NBD"
        );
    }
    let start = element.find("<source ").context("the disk has no source in the domain's XML")?;
    let end = start + element[start..].find('>').context("the domain's XML is invalid")? + 1;
    if !element[start..end].ends_with("/>") {
        bail!("the disk's <source> in the domain's XML has additional elements, which hob does not convert");
    }
    let indent = " ".repeat(element[..start].len() - element[..start].trim_end_matches(' ').len());
    let source = format!(
        "<source protocol='nbd' name='{}'>\n{indent}  <host transport='unix' socket='{}'/>\n\
         {indent}  <reconnect delay='300'/>\n{indent}</source>",
        escape(disk),
        escape(socket)
    );
    let mut new = format!("{}{source}{}", &element[..start], &element[end..]);
    let tag = new.find('>').context("the domain's XML is invalid")?;
    for kind in ["file", "block"] {
        let old = format!(" type='{kind}'");
        if new[..tag].contains(&old) {
            new = new.replacen(&old, " type='network'", 1);
        }
    }
    // Removes the I/O modes that libvirt accepts only for files.
    for way in ["native", "threads", "io_uring"] {
        new = new.replacen(&format!(" io='{way}'"), "", 1);
    }
    Ok(new)
}

/// Returns the element of a disk with an image as its source, for an element with hob as its source.
/// hob uses this function if the original element is lost.
pub(super) fn with_image(element: &str, file: &Path) -> anyhow::Result<String> {
    let invalid = "the domain's XML is invalid";
    let path = file.to_str().context("the image file has a name that is not UTF-8")?;
    let is_device = std::fs::metadata(file).is_ok_and(|file| file.file_type().is_block_device());
    let (kind, attribute) = if is_device { ("block", "dev") } else { ("file", "file") };
    let start = element.find("<source ").context("the disk has no source in the domain's XML")?;
    let tag = start + element[start..].find('>').context(invalid)? + 1;
    let end = match element[start..tag].ends_with("/>") {
        true => tag,
        false => tag + element[tag..].find("</source>").context(invalid)? + "</source>".len(),
    };
    let new = format!("{}<source {attribute}='{}'/>{}", &element[..start], escape(path), &element[end..]);
    Ok(new.replacen(" type='network'", &format!(" type='{kind}'"), 1))
}

/// Returns the persistent XML of a domain, or `None` if it has none or does not exist any more.
pub(super) async fn definition(domain: &str) -> anyhow::Result<Option<String>> {
    match when_reachable(async || Info::read(domain).await).await {
        Err(error) if is_unknown_domain(&error) => return Ok(None),
        Ok(info) if !info.is_persistent => return Ok(None),
        Err(error) => return Err(error),
        Ok(_) => {}
    }
    let args = ["dumpxml", "--inactive", "--security-info", domain];
    when_reachable(async || virsh::virsh(&args).await).await.map(Some)
}

/// Returns the XML of the saved state of a domain (`virsh managedsave`), or `None` if the domain is
/// not saved or does not exist any more. The domain's next start uses this XML, and not the
/// persistent XML.
pub(super) async fn saved(domain: &str) -> anyhow::Result<Option<String>> {
    match when_reachable(async || Info::read(domain).await).await {
        Err(error) if is_unknown_domain(&error) => return Ok(None),
        Ok(info) if !info.is_saved => return Ok(None),
        Err(error) => return Err(error),
        Ok(_) => {}
    }
    let args = ["managedsave-dumpxml", domain];
    when_reachable(async || virsh::virsh(&args).await).await.map(Some)
}

/// Returns true if the XML of a saved state has hob's disk. A domain whose disk was attached while
/// the domain ran is saved with its image, because libvirt does not know hob's node.
pub(super) fn is_saved_with_hob(saved: &str, record: &Record) -> bool {
    matches!(find(saved, &record.file, &record.disk), Some(Defined::Hob(_)))
}

/// Refuses to remove disks of hob that a saved state needs. `saved` is the XML of the saved state.
///
/// # Errors
/// Returns an error that says how to detach the disks.
pub(super) fn check_saved(domain: &str, saved: &str, records: &[Record]) -> anyhow::Result<()> {
    let Some(record) = records.iter().find(|record| is_saved_with_hob(saved, record)) else { return Ok(()) };
    bail!(
        "the domain {domain} is saved ('virsh managedsave') with hob's disk {}, and cannot be restored without it. \
         Restore the domain with 'virsh start {domain}', shut it down, and repeat the command; or discard its saved \
         memory with 'virsh managedsave-remove {domain}', and repeat the command",
        record.disk
    )
}

/// Replaces one element of the persistent XML of a domain.
pub(super) async fn replace(domain: &str, old: &str, new: &str) -> anyhow::Result<()> {
    let xml = definition(domain).await?.with_context(|| format!("{domain} has no persistent definition"))?;
    let xml = xml.replacen(old, new, 1);
    when_reachable(async || -> anyhow::Result<()> {
        let xml = xml.clone();
        in_thread(move || define(&xml)).await?
    })
    .await
}

/// Sets the persistent XML of a domain.
fn define(xml: &str) -> anyhow::Result<()> {
    let mut command = virsh::command();
    command.args(["define", "/dev/stdin"]);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().context("cannot run virsh, which is in the package libvirt-clients")?;
    // Without a connection, virsh ends before it reads its input.
    let written = child.stdin.take().context("a pipe")?.write_all(xml.as_bytes());
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("virsh define: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    written.context("virsh does not read the domain's XML")
}

fn elements(xml: &str) -> impl Iterator<Item = &str> {
    let mut rest = xml;
    std::iter::from_fn(move || {
        let start = rest.find("<disk ")?;
        let end = start + rest[start..].find("</disk>")? + "</disk>".len();
        let element = &rest[start..end];
        rest = &rest[end..];
        Some(element)
    })
}

/// Returns the path of the image in the `<source>` of a disk.
fn source(element: &str) -> Option<String> {
    let start = element.find("<source ")?;
    let tag = &element[start..start + element[start..].find('>')?];
    attribute(tag, "file").or_else(|| attribute(tag, "dev"))
}

fn is_hobs(element: &str, disk: &str) -> bool {
    let Some(start) = element.find("<source ") else { return false };
    let tag = element[start..].split('>').next().unwrap_or_default();
    attribute(tag, "protocol").as_deref() == Some("nbd") && attribute(tag, "name").as_deref() == Some(disk)
}

fn attribute(tag: &str, name: &str) -> Option<String> {
    ['\'', '"'].into_iter().find_map(|quote| {
        let key = format!(" {name}={quote}");
        let start = tag.find(&key)? + key.len();
        let value = &tag[start..start + tag[start..].find(quote)?];
        Some(unescape(value))
    })
}

const ENTITIES: [(&str, &str); 5] =
    [("&lt;", "<"), ("&gt;", ">"), ("&apos;", "'"), ("&quot;", "\""), ("&amp;", "&")];

fn unescape(text: &str) -> String {
    ENTITIES.iter().fold(text.to_owned(), |text, (entity, character)| text.replace(entity, character))
}

fn escape(text: &str) -> String {
    ENTITIES.iter().rev().fold(text.to_owned(), |text, (entity, character)| text.replace(character, entity))
}

#[cfg(test)]
mod tests {
    use super::super::record::example;
    use super::*;

    const XML: &str = "<domain>
  <devices>
    <disk type='file' device='cdrom'>
      <target dev='sda' bus='sata'/>
    </disk>
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' cache='none' io='native' discard='unmap'/>
      <source file='/srv/a&amp;b.qcow2'/>
      <target dev='vda' bus='virtio'/>
    </disk>
  </devices>
</domain>";

    #[test]
    fn one_disk_is_rewritten_and_restored() {
        let file = Path::new("/srv/a&b.qcow2");
        let Some(Defined::Image(old)) = find(XML, file, "web-vda") else { panic!("not found") };
        let new = with_hob(&old, "web-vda", "/run/hob/nbd.sock").unwrap();
        assert_eq!(
            new,
            "<disk type='network' device='disk'>
      <driver name='qemu' type='qcow2' cache='none' discard='unmap'/>
      <source protocol='nbd' name='web-vda'>
        <host transport='unix' socket='/run/hob/nbd.sock'/>
        <reconnect delay='300'/>
      </source>
      <target dev='vda' bus='virtio'/>
    </disk>"
        );
        let changed = XML.replacen(&old, &new, 1);
        assert_eq!(find(&changed, file, "web-vda"), Some(Defined::Hob(new.clone())));
        assert_eq!(changed.replacen(&new, &old, 1), XML);
        assert_eq!(find(XML, Path::new("/other"), "web-vda"), None);
    }

    /// The I/O mode, which hob has removed for the network disk, is lost.
    #[test]
    fn an_element_with_hob_gets_the_image_again() {
        let file = Path::new("/srv/a&b.qcow2");
        let Some(Defined::Image(old)) = find(XML, file, "web-vda") else { panic!("not found") };
        let new = with_hob(&old, "web-vda", "/run/hob/nbd.sock").unwrap();
        assert_eq!(with_image(&new, file).unwrap(), old.replace(" io='native'", ""));
        let short = "<disk type='network'><source protocol='nbd' name='d'/></disk>";
        assert_eq!(
            with_image(short, Path::new("/nowhere/a")).unwrap(),
            "<disk type='file'><source file='/nowhere/a'/></disk>"
        );
        assert!(with_image("<disk type='network'></disk>", file).is_err());
    }

    #[test]
    fn a_disk_that_a_saved_state_needs_is_kept() {
        let record = |disk: &str| {
            let (target, format) = ("libvirt:web".to_owned(), "qcow2".to_owned());
            Record { target, disk: disk.to_owned(), file: "/srv/a&b.qcow2".into(), format, ..example() }
        };
        // The disk was attached while the domain ran.
        check_saved("web", XML, &[record("web-vda")]).unwrap();
        let Some(Defined::Image(old)) = find(XML, Path::new("/srv/a&b.qcow2"), "web-vda") else {
            panic!("not found")
        };
        let started = XML.replacen(&old, &with_hob(&old, "web-vda", "/run/hob/nbd.sock").unwrap(), 1);
        // The XML of a domain that has run numbers the sources.
        let started = started.replace(" name='web-vda'>", " name='web-vda' index='1'>");
        let records = [record("web-vdb"), record("web-vda")];
        let error = check_saved("web", &started, &records).unwrap_err().to_string();
        assert!(error.contains("hob's disk web-vda,"), "{error}");
        assert!(error.contains("'virsh start web'") && error.contains("managedsave-remove web"), "{error}");
    }

    #[test]
    fn a_definition_may_name_the_image_by_another_link() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("image"), "x").unwrap();
        let [one, other] = ["one", "other"].map(|name| dir.path().join(name));
        for link in [&one, &other] {
            std::os::unix::fs::symlink("image", link).unwrap();
        }
        let xml = format!("<disk type='block'><source dev='{}'/></disk>", one.display());
        for file in [&one, &other, &dir.path().join("image")] {
            assert!(matches!(find(&xml, file, "d"), Some(Defined::Image(_))), "{}", file.display());
        }
        assert_eq!(find(&xml, &dir.path().join("missing"), "d"), None);
    }

    #[test]
    fn a_source_with_elements_is_not_touched() {
        for (element, reason) in [
            (
                "<disk type='file'><source file='/a'><seclabel model='dac'/></source></disk>",
                "additional elements",
            ),
            ("<disk type='block' device='lun'><source dev='/dev/sda'/></disk>", "device='lun'"),
        ] {
            let error = with_hob(element, "d", "/s").unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
