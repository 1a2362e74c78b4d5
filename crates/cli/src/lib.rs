//! The command line: one file per command, registered in [`Command`].
//!
//! Commands that change or show a running daemon are clients of its control API; `serve`, `daemon`
//! and `demo` are daemons themselves. Tables are for people and may change. The output of `-o json`
//! is for programs and does not change.

mod advise;
mod attach;
mod bitmap;
mod cache;
mod cluster;
mod completions;
mod config;
mod confirmation;
mod daemon;
mod dashboard;
mod datastore;
mod demo;
mod disk;
mod docs;
mod drain;
mod explain;
mod export;
mod health;
mod histogram;
mod lab;
mod man;
mod migrate;
mod objects;
mod options;
mod output;
mod peer;
mod pool;
mod qos;
mod record;
mod remote;
mod replay;
mod selftest;
mod serve;
mod settings;
mod sockets;
mod stats;
mod swap;
mod tasks;
mod top;
mod watch;

use std::path::PathBuf;

use clap::{CommandFactory, Parser, Subcommand};
use hob_control::{Endpoint, without_error_numbers};
use hob_daemon::{ConfigError, ControlConfig, TlsFiles};
use output::Format;

/// hob keeps the hot blocks of virtual machine disks on local flash
#[derive(Debug, Parser)]
#[command(name = "hob", version, disable_help_subcommand = true)]
#[command(arg_required_else_help = true, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// Options of every command.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// Control socket, unix:/path, or tcp:host:port or https://host:port for TLS [default:
    /// unix:/run/hob/control.sock]. `serve` and `daemon` listen on this address; other commands
    /// connect to it, or to HOB_CONTROL
    #[arg(long, visible_alias = "url", global = true, value_name = "ADDRESS")]
    #[arg(value_parser = Endpoint::parse_control, help_heading = "Global options")]
    control: Option<Endpoint>,
    /// File with the token for a control socket over TCP [env: HOB_TOKEN_FILE]
    #[arg(long, global = true, value_name = "FILE", help_heading = "Global options")]
    token_file: Option<PathBuf>,
    /// Certificates to trust over TLS, PEM: the daemon's CA, or, for `serve` and `daemon`, that of
    /// clients [env: HOB_CA]
    #[arg(long, global = true, value_name = "FILE", help_heading = "Global options")]
    ca: Option<PathBuf>,
    /// Certificate to show over TLS, PEM; `serve` and `daemon` need one for TCP [env: HOB_CERT]
    #[arg(long, global = true, value_name = "FILE", requires = "key", help_heading = "Global options")]
    cert: Option<PathBuf>,
    /// Private key of the certificate, PEM [env: HOB_KEY]
    #[arg(long, global = true, value_name = "FILE", requires = "cert", help_heading = "Global options")]
    key: Option<PathBuf>,
    /// Output format: a table for people or JSON for programs
    #[arg(short, long, global = true, value_enum, default_value_t, help_heading = "Global options")]
    output: Format,
    /// Log filter for stderr, like info or hob=debug,warn [env: HOB_LOG]
    #[arg(long, global = true, value_name = "FILTER", help_heading = "Global options")]
    log: Option<String>,
    /// Format of log lines: text for people or json for programs [env: HOB_LOG_FORMAT] [default:
    /// text]
    #[arg(long, global = true, value_enum, value_name = "FORMAT", help_heading = "Global options")]
    log_format: Option<LogFormat>,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

impl Global {
    /// Replaces the daemon's settings of the control API with those of the command line.
    fn say_in(&self, control: &mut ControlConfig) {
        if let Some(endpoint) = &self.control {
            control.listen = vec![endpoint.clone()];
        }
        if let Some(token_file) = &self.token_file {
            control.token_file = Some(token_file.clone());
        }
        if let (Some(cert), Some(key)) = (&self.cert, &self.key) {
            let client_ca = control.tls.take().and_then(|files| files.client_ca);
            control.tls = Some(TlsFiles { cert: cert.clone(), key: key.clone(), client_ca });
        }
        if let (Some(ca), Some(files)) = (&self.ca, &mut control.tls) {
            files.client_ca = Some(ca.clone());
        }
    }
}

/// Every command. A command is one file of this directory, one line here and one in [`dispatch`].
#[derive(Debug, Subcommand)]
enum Command {
    Serve(Box<serve::Serve>),
    Daemon(daemon::Daemon),
    Demo(demo::Demo),
    #[command(subcommand)]
    Pool(pool::Pool),
    #[command(subcommand)]
    Peer(peer::Peer),
    #[command(subcommand)]
    Disk(disk::Disk),
    #[command(subcommand)]
    Export(export::Export),
    #[command(subcommand)]
    Bitmap(bitmap::Bitmap),
    #[command(subcommand)]
    Cache(cache::Cache),
    #[command(subcommand)]
    Qos(qos::Qos),
    #[command(subcommand)]
    Datastore(datastore::Datastore),
    #[command(subcommand)]
    Objects(objects::Objects),
    #[command(subcommand)]
    Swap(swap::Swap),
    #[command(subcommand)]
    Config(config::Config),
    Drain(drain::Drain),
    Attach(Box<attach::Attach>),
    Detach(attach::Detach),
    Migrate(migrate::Migrate),
    #[command(subcommand)]
    Cluster(cluster::Cluster),
    Stats(stats::Stats),
    Top(top::Top),
    Dashboard(dashboard::Dashboard),
    Health(health::Health),
    Tasks(tasks::Tasks),
    Explain(explain::Explain),
    Histogram(histogram::Histogram),
    Advise(advise::Advise),
    Record(record::Record),
    Replay(replay::Replay),
    Selftest(selftest::Selftest),
    #[command(subcommand)]
    Lab(lab::Lab),
    Completions(completions::Completions),
    Man(man::Man),
    #[command(hide = true)]
    Docs(docs::Docs),
    #[command(hide = true)]
    SwapOff(swap::SwapOff),
}

fn dispatch(command: Command, global: &Global) -> anyhow::Result<()> {
    match command {
        Command::Serve(args) => serve::run(*args, global).inspect_err(|_| hob_daemon::abandon_hand_over()),
        Command::Daemon(args) => daemon::run(&args, global).inspect_err(|_| hob_daemon::abandon_hand_over()),
        Command::Demo(args) => demo::run(args),
        Command::Pool(args) => pool::run(args, global),
        Command::Peer(args) => peer::run(args, global),
        Command::Disk(args) => disk::run(args, global),
        Command::Export(args) => export::run(args, global),
        Command::Bitmap(args) => bitmap::run(args, global),
        Command::Cache(args) => cache::run(args, global),
        Command::Qos(args) => qos::run(args, global),
        Command::Datastore(args) => datastore::run(args, global),
        Command::Objects(args) => objects::run(args, global),
        Command::Swap(args) => swap::run(args, global),
        Command::Config(args) => config::run(args, global),
        Command::Drain(args) => drain::run(&args, global),
        Command::Attach(args) => attach::run_attach(*args, global),
        Command::Detach(args) => attach::run_detach(args, global),
        Command::Migrate(args) => migrate::run(&args, global),
        Command::Cluster(args) => cluster::run(args, global),
        Command::Stats(args) => stats::run(&args, global),
        Command::Health(args) => health::run(&args, global),
        Command::Tasks(args) => tasks::run(&args, global),
        Command::Top(args) => top::run(&args, global),
        Command::Dashboard(args) => dashboard::run(&args, global),
        Command::Explain(args) => explain::run(&args, global),
        Command::Histogram(args) => histogram::run(&args, global),
        Command::Advise(args) => advise::run(&args, global),
        Command::Record(args) => record::run(&args, global),
        Command::Replay(args) => replay::run(&args, global),
        Command::Selftest(args) => selftest::run(&args, global),
        Command::Lab(args) => lab::run(args, global),
        Command::Completions(args) => completions::run(&args, global),
        Command::Man(args) => man::run(&args),
        Command::Docs(args) => docs::run(&args),
        Command::SwapOff(args) => swap::run_off(&args),
    }
}

/// Parses and runs the command, and reports an error in one line. Returns the exit code: 0, 1, or 2
/// for an invalid command line.
pub fn main() -> u8 {
    let Cli { global, command } = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    if let Err(error) = start_log(global.log.as_deref(), global.log_format) {
        complain(&error);
        return 2;
    }
    match dispatch(command, &global) {
        Ok(()) => 0,
        Err(error) if is_broken_pipe(&error) => 0,
        Err(error) if error.is::<DryRunEnded>() => 0,
        Err(error) if error.is::<NotInOrder>() => 1,
        Err(error) if error.is::<ConfigError>() => {
            // All errors in a file, one line each.
            error.to_string().lines().for_each(complain);
            1
        }
        Err(error) => {
            complain(&with_causes(&error));
            1
        }
    }
}

/// Handles an error of the parser. Help and version go to stdout and are not errors; other errors
/// are reported in one line.
fn usage(error: &clap::Error) -> u8 {
    use clap::error::ErrorKind;

    if !error.use_stderr() {
        let _ = error.print();
        return 0;
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
        return 2;
    }
    complain(&usage_line(&error.to_string()));
    2
}

/// Returns the first paragraph of clap's message, with a reference to the help.
fn usage_line(message: &str) -> String {
    let paragraph: Vec<&str> = message.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    let said = paragraph.join(" ");
    let said = said.strip_prefix("error: ").unwrap_or(&said);
    let usage = message.lines().find_map(|line| line.trim().strip_prefix("Usage: "));
    let path: Vec<&str> = usage
        .unwrap_or("hob")
        .split_whitespace()
        .take_while(|word| word.starts_with(|c: char| c.is_ascii_lowercase()))
        .collect();
    format!("{said}; see '{} --help'", path.join(" "))
}

/// Returns the error and its causes, without causes that a message already names.
fn with_causes(error: &anyhow::Error) -> String {
    let mut said = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !said.contains(&cause) {
            said = format!("{said}: {cause}");
        }
    }
    said
}

/// Result of `--dry-run`: the effects were printed, and nothing was changed.
#[derive(Debug, thiserror::Error)]
#[error("nothing was changed")]
struct DryRunEnded;

/// Result of a query that found a problem. The exit code shows the problem, without a message.
#[derive(Debug, thiserror::Error)]
#[error("something is wrong")]
struct NotInOrder;

fn complain(what: &str) {
    use std::io::Write;

    let line = what.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    let line = without_error_numbers(&line);
    let line = output::printable(&line);
    // stderr may be closed; this is not an error.
    let _ = writeln!(std::io::stderr(), "hob: {line}");
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let is_pipe = |io: &std::io::Error| io.kind() == std::io::ErrorKind::BrokenPipe;
    error.downcast_ref::<output::StdoutError>().is_some_and(|output::StdoutError(io)| is_pipe(io))
}

/// Default log filter. The crate `object_store` reports each failed attempt of a request at the level
/// INFO, without the disk. hob retries for longer, and reports the outage itself.
const LOG_FILTER: &str = "info,object_store=warn";

fn start_log(filter: Option<&str>, format: Option<LogFormat>) -> Result<(), String> {
    use clap::ValueEnum;
    use std::io::IsTerminal;

    let from_env = std::env::var("HOB_LOG").ok();
    let text = filter.or(from_env.as_deref()).unwrap_or(LOG_FILTER);
    let filter = tracing_subscriber::EnvFilter::builder()
        .parse(text)
        .map_err(|error| format!("the log filter '{text}' is invalid: {error}"))?;
    let format = match (format, std::env::var("HOB_LOG_FORMAT")) {
        (Some(format), _) => format,
        (None, Ok(name)) if !name.is_empty() => LogFormat::from_str(&name, false)
            .map_err(|_| format!("HOB_LOG_FORMAT is '{name}'; the value must be text or json"))?,
        _ => LogFormat::Text,
    };
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| output::LogWriter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false);
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().flatten_event(true).with_span_list(false).init(),
    }
    Ok(())
}

/// Returns the command line as a clap command, for completions, manual pages and docs.
fn clap_command() -> clap::Command {
    Cli::command()
}

#[cfg(test)]
mod doc_examples;
#[cfg(test)]
mod tests;
