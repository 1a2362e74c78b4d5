//! `hob completions SHELL`: completion scripts. The scripts call `hob completions --names` for the
//! names of disks and pools, which only the daemon knows, and of VMs.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::anyhow;
use clap::{Arg, ArgAction, Args, Command};
use clap_complete::Shell;
use hob_control::client::ClientError;

use super::Global;
use super::attach::{RECORDS, targets};
use super::output::write;
use super::remote::{converse, explain};

/// Maximum time for the daemon's reply, because the user's shell waits.
const REPLY_MAX: Duration = Duration::from_secs(3);

/// Completes names in bash, where clap's script completes options.
const BASH: &str = r#"
# Adds the names of disks, pools and VMs.
_hob_with_names() {
    _hob "$@"
    local word=${COMP_WORDS[COMP_CWORD]} prefix= part names is_split=
    [[ $word == -* ]] && return
    # bash splits words at colons, as in qmp:PATH. The part before the current one is in "prefix".
    local -a words=()
    for part in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        if [[ $part == : && ${#words[@]} -gt 0 ]]; then
            words[${#words[@]}-1]+=:
            is_split=yes
        elif [[ $is_split ]]; then
            words[${#words[@]}-1]+=$part
            is_split=
        else
            words+=("$part")
        fi
    done
    if [[ $word == : && ${#words[@]} -gt 0 ]]; then
        words[${#words[@]}-1]+=:
        is_split=yes
        word=
    fi
    if [[ $is_split ]]; then
        prefix=${words[${#words[@]}-1]}
        unset "words[${#words[@]}-1]"
    fi
    names=$(hob completions --names -- "${words[@]}" 2>/dev/null)
    [[ -z $names ]] && return
    COMPREPLY=($(compgen -W "$names" -- "$prefix$word"))
    COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
}
complete -F _hob_with_names -o bashdefault -o default hob
"#;

/// Functions for zsh, which [`zsh`] adds to clap's script.
const ZSH: &str = r#"
_hob_disks() {
    local -a names=(${(f)"$(hob completions --names -- disk show 2>/dev/null)"})
    compadd -a names
}

_hob_pools() {
    local -a names=(${(f)"$(hob completions --names -- pool show 2>/dev/null)"})
    compadd -a names
}

_hob_vms() {
    local -a names=(${(f)"$(hob completions --names -- attach 2>/dev/null)"})
    compadd -a names
}

_hob_attached_vms() {
    local -a names=(${(f)"$(hob completions --names -- detach 2>/dev/null)"})
    compadd -a names
}
"#;

/// Completes arguments in fish. [`fish`] completes the values of options.
const FISH: &str = r#"
# The names of disks, pools and VMs.
complete -c hob -f -n 'not string match -q -- "-*" (commandline -ct)' -a '(hob completions --names -- (commandline -opc)[2..] 2>/dev/null)'
"#;

/// Print a completion script for a shell
///
/// The scripts for bash, zsh and fish also complete the names of disks and pools, if the daemon
/// answers, and of running and attached VMs.
#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// Name of the shell
    #[arg(value_enum, required_unless_present = "names")]
    shell: Option<Shell>,
    /// Print the names of disks, pools or VMs that can follow the words after `--`, for the scripts
    #[arg(long, hide = true, conflicts_with = "shell")]
    names: bool,
    #[arg(last = true, hide = true, requires = "names")]
    words: Vec<String>,
}

pub(super) fn run(args: &Completions, global: &Global) -> anyhow::Result<()> {
    let Some(shell) = args.shell else { return print_names(&args.words, global) };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut super::clap_command(), "hob", &mut script);
    let script = String::from_utf8(script)?;
    let script = match shell {
        Shell::Bash => script + BASH,
        Shell::Zsh => zsh(&script),
        Shell::Fish => fish(&script),
        _ => script,
    };
    write(script.as_bytes())
}

/// Adds names of disks and pools to clap's script for zsh.
fn zsh(script: &str) -> String {
    let mut changed = String::new();
    for line in script.lines() {
        let argument = line.trim_start();
        let is = |name: &str, value: &str| {
            let begins = [format!("':{name} --"), format!("'::{name} --")];
            begins.iter().any(|begin| argument.starts_with(begin))
                || line.contains(&format!("]:{value}:_default"))
        };
        let function = if is("disk", "DISK") {
            "_hob_disks"
        } else if is("pool", "POOL") {
            "_hob_pools"
        } else if argument.starts_with("'::target -- The VM") {
            // `hob attach` needs no target with `--list`.
            "_hob_vms"
        } else if argument.starts_with("':target -- The VM") {
            "_hob_attached_vms"
        } else {
            "_default"
        };
        changed += &line.replace(":_default'", &format!(":{function}'"));
        changed += "\n";
    }
    // The last part of the script starts the completion, so the functions must come before.
    let end = changed.rfind("\nif [ ").unwrap_or(changed.len());
    changed.insert_str(end, ZSH);
    changed
}

/// Adds names of disks and pools to clap's script for fish.
fn fish(script: &str) -> String {
    let pools = " -f -a '(hob completions --names -- pool show 2>/dev/null)'";
    let mut changed = String::new();
    for line in script.lines() {
        let is_pool = line.contains(" -l pool ") && line.ends_with(" -r");
        changed += line;
        changed += if is_pool { pools } else { "" };
        changed += "\n";
    }
    changed + FISH
}

/// Kind of name that can complete a word of a command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Names {
    Disks,
    Pools,
    /// Running VMs.
    Vms,
    /// VMs with attached disks.
    AttachedVms,
    /// Attached disks of one VM.
    AttachedDisks,
    Other,
}

fn print_names(words: &[String], global: &Global) -> anyhow::Result<()> {
    let names = match wanted(words) {
        Names::Other => return Ok(()),
        Names::Vms => targets::running(),
        Names::AttachedVms => targets::attached(&records(words)),
        Names::AttachedDisks => targets::attached_disks(&records(words), target(words)),
        names @ (Names::Disks | Names::Pools) => of_daemon(names, global)?,
    };
    write(names.iter().map(|name| format!("{name}\n")).collect::<String>().as_bytes())
}

/// Returns the directory with the records of attached disks.
fn records(words: &[String]) -> PathBuf {
    let mut words =
        words.iter().filter(|word| *word != "=").skip_while(|word| !word.starts_with("--records"));
    let named = words.next().and_then(|word| word.strip_prefix("--records="));
    named.or_else(|| words.next().map(String::as_str)).unwrap_or(RECORDS).into()
}

/// Returns the VM that a command line names.
fn target(words: &[String]) -> &str {
    let is_target = |word: &&String| ["qmp:", "libvirt:", "pve:"].iter().any(|kind| word.starts_with(kind));
    words.iter().find(is_target).map_or("", String::as_str)
}

/// Asks the daemon for names.
fn of_daemon(names: Names, global: &Global) -> anyhow::Result<Vec<String>> {
    converse(global, async |client| {
        let reply = tokio::time::timeout(REPLY_MAX, async {
            Ok::<_, ClientError>(match names {
                Names::Pools => client.pools().await?.into_iter().map(|pool| pool.name).collect(),
                _ => client.disks().await?.into_iter().map(|disk| disk.name).collect(),
            })
        });
        reply.await.map_err(|_| anyhow!("the daemon does not answer"))?.map_err(explain)
    })
}

/// Returns the kind of name that can follow these words of a command line. The words exclude the
/// program's name.
fn wanted(words: &[String]) -> Names {
    let mut root = super::clap_command();
    root.build();
    let mut command = &root;
    let mut position = 0;
    let mut option = None;
    // bash makes a word of each equals sign.
    for word in words.iter().filter(|word| *word != "=") {
        if option.take().is_some() {
            continue;
        }
        if word.starts_with('-') {
            option = option_with_value(command, word);
        } else if let Some(below) = command.find_subcommand(word).filter(|_| position == 0) {
            command = below;
        } else {
            position += 1;
        }
    }
    let argument = option.or_else(|| {
        let positionals: Vec<&Arg> = command.get_positionals().collect();
        // The last argument may have several values.
        let last = positionals.last().filter(|last| matches!(last.get_action(), ArgAction::Append));
        positionals.get(position).or(last).copied()
    });
    match (command.get_name(), argument.map(|argument| argument.get_id().as_str())) {
        (_, Some("disk")) => Names::Disks,
        (_, Some("pool")) => Names::Pools,
        ("attach", Some("target")) => Names::Vms,
        ("detach", Some("target")) => Names::AttachedVms,
        ("detach", Some("disks")) => Names::AttachedDisks,
        _ => Names::Other,
    }
}

/// Returns the option of this name if its value is the next word.
fn option_with_value<'a>(command: &'a Command, word: &str) -> Option<&'a Arg> {
    let is_it = |argument: &&Arg| match word.strip_prefix("--") {
        Some(long) => argument.get_long_and_visible_aliases().is_some_and(|names| names.contains(&long)),
        None => {
            let short = word.strip_prefix('-').and_then(|short| short.parse::<char>().ok());
            short.is_some() && short == argument.get_short()
        }
    };
    let found = command.get_arguments().filter(|argument| !argument.is_positional()).find(is_it)?;
    found.get_num_args().is_some_and(|count| count.min_values() > 0).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Names {
        wanted(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn disks_and_pools_are_completed_where_commands_take_them() {
        for line in
            ["disk show", "disk remove", "stats", "cache set", "-o json drain", "bitmap list", "cache resize"]
        {
            assert_eq!(of(line), Names::Disks, "{line}");
        }
        for line in ["pool show", "cache enable web --pool", "cache enable --pool =", "attach qmp:/x --pool"]
        {
            assert_eq!(of(line), Names::Pools, "{line}");
        }
        for line in
            ["disk", "disk add", "pool", "stats web", "cache enable web --size", "-o", "no-such command"]
        {
            assert_eq!(of(line), Names::Other, "{line}");
        }
        for (line, names) in [
            ("attach", Names::Vms),
            ("attach --size 4G", Names::Vms),
            ("attach qmp:/x", Names::Other),
            ("detach", Names::AttachedVms),
            ("detach --records /r", Names::AttachedVms),
            ("detach qmp:/x", Names::AttachedDisks),
            ("detach qmp:/x vda", Names::AttachedDisks),
        ] {
            assert_eq!(of(line), names, "{line}");
        }
        assert_eq!(of("cache enable --pool flash"), Names::Disks);
        assert_eq!(of("cache enable --pool = flash"), Names::Disks);
    }

    #[test]
    fn the_records_and_the_vm_are_those_of_the_command_line() {
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        for (line, directory) in [
            ("detach", RECORDS),
            ("detach --records /r", "/r"),
            ("detach --records = /r", "/r"),
            ("detach --records=/r qmp:/x", "/r"),
        ] {
            assert_eq!(records(&words(line)), PathBuf::from(directory), "{line}");
        }
        assert_eq!(target(&words("detach --records /r pve:100 virtio0")), "pve:100");
        assert_eq!(target(&words("detach")), "");
    }

    fn script_of(shell: Shell) -> String {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut crate::clap_command(), "hob", &mut script);
        String::from_utf8(script).unwrap()
    }

    #[test]
    fn the_script_of_fish_completes_names_of_pools() {
        let script = fish(&script_of(Shell::Fish));
        let options: Vec<&str> = script.lines().filter(|line| line.contains(" -l pool ")).collect();
        assert!(
            !options.is_empty() && options.iter().all(|line| line.contains("-- pool show")),
            "{options:?}"
        );
    }

    #[test]
    fn the_script_of_zsh_completes_names() {
        let script = zsh(&script_of(Shell::Zsh));
        for part in [
            "':disk -- The disk:_hob_disks'",
            ":POOL:_hob_pools'",
            "':pool -- The pool:_hob_pools'",
            ":_hob_vms'",
            ":_hob_attached_vms'",
        ] {
            assert!(script.contains(part), "{part}");
        }
        let functions = script.find("\n_hob_pools() {").unwrap();
        assert!(functions < script.rfind("compdef _hob hob").unwrap());
    }
}
