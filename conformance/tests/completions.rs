//! The completion script for bash, with the names of disks and pools of a running daemon, and of
//! attached VMs.

use std::os::unix::fs::symlink;

use conformance::data::empty_file;
use conformance::hob::{binary, command};
use conformance::scratch::wait_for;
use conformance::{MIB, Scratch, Tool};

#[test]
fn bash_completes_names_of_disks_pools_and_vms() {
    let scratch = Scratch::new();
    empty_file(&scratch.path("web.img"), 4 * MIB);
    let control = format!("unix:{}", scratch.text("ctl.sock"));
    let config = format!(
        "[[pool]]\nname = \"flash\"\ndevices = [{:?}]\nsize = \"64M\"\n\
         [[disk]]\nname = \"web\"\nbacking = {:?}\n",
        scratch.path("flash"),
        scratch.path("web.img"),
    );
    scratch.configure(&config);
    let daemon = scratch.start_daemon();
    let script = command(&["completions", "bash"]);
    assert!(script.success(), "{}", script.all());
    std::fs::write(scratch.path("hob.bash"), script.stdout).unwrap();
    symlink(binary(), scratch.path("hob")).unwrap();
    let path = format!("{}:{}", scratch.text(""), std::env::var("PATH").unwrap_or_default());
    // Completes the last word as bash does.
    let completed = |line: &str| {
        let count = line.split(' ').count() - 1;
        let shell = format!(
            "source \"$1\"; COMP_WORDS=({line}\"\"); COMP_CWORD={count}; \
             _hob_with_names hob \"${{COMP_WORDS[{count}]}}\" \"${{COMP_WORDS[{}]}}\"; echo \"${{COMPREPLY[@]}}\"",
            count - 1
        );
        let bash = Tool::new("bash").args(["-c", &shell, "bash", &scratch.text("hob.bash")]);
        bash.env("HOB_CONTROL", &control).env("PATH", &path).run().trim().to_owned()
    };
    // Without an answer of the daemon in time, hob completes no names.
    wait_for("names", || completed("hob disk show ") == "web");
    wait_for("names", || completed("hob stats w") == "web");
    assert_eq!(completed("hob stats x"), "");
    wait_for("names", || completed("hob pool show ") == "flash");
    wait_for("names", || completed("hob cache enable web --pool ") == "flash");
    assert!(completed("hob cache enable web --p").contains("--pool"), "options are still completed");
    assert!(completed("hob di").contains("disk"), "commands are still completed");
    // Attached VMs. bash makes words of the parts of a target.
    let record = serde_json::json!({
        "version": 1, "target": "qmp:/run/web.qmp", "disk": "web-vda", "label": "vda", "backend": "vda",
        "file": "/srv/web.img", "format": "raw", "method": "reopen", "cache": { "pool": "flash" }, "node": {},
        "spare": [],
    });
    std::fs::write(scratch.path("web-vda.json"), record.to_string()).unwrap();
    let detach = format!("hob detach --records {} ", scratch.text(""));
    assert_eq!(completed(&detach), "qmp:/run/web.qmp");
    assert_eq!(completed(&format!("{detach}q")), "qmp:/run/web.qmp");
    assert_eq!(completed(&format!("{detach}qmp :")), "/run/web.qmp");
    assert_eq!(completed(&format!("{detach}qmp : /run/w")), "/run/web.qmp");
    assert_eq!(completed(&format!("{detach}qmp : /run/x")), "");
    assert_eq!(completed(&format!("{detach}qmp : /run/web.qmp ")), "vda");
    daemon.stop();
    assert!(completed("hob stats ").contains("--help"), "options, without the daemon");
}
