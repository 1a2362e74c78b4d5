//! What this host lends: a file for each borrower, which is served to that borrower only, as an NBD export, by a shard's ring.
//!
//! A loan is bound to the certificate with which it was asked for first. While it is open it has an *epoch*, a random word that is new
//! each time its file is opened: a connection says which one it means, so that a borrower never goes on with a file of which a
//! crash of this host may have lost what was not flushed. What a loan is survives restarts in a file beside it.
//!
//! It refuses to lend more than `lend_max` in all, to make a loan anew while somebody needs its bytes, and to open as an image what a
//! borrower wrote: it is a plain file whatever it looks like.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use hob_control::{Loan, LoanAsk, LoanState, Problem, Size};
use hob_engine::command::{Access, DiskConfig};
use hob_engine::io::Promote;
use hob_engine::units::DiskId;
use hob_storage::pool::{REMOTE_EXPORT, superblock_uuid};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, oneshot};

use super::datastores::datastore_of;
use super::disks::export_info;
use super::flash::blocking;
use super::refusal::{Kind, Refusal};
use super::{Inner, Manager};
use crate::daemon::allow::{AllowList, Peer, Visible};
use crate::daemon::exports::{Export, Exports};
use crate::daemon::hardware::Backing;
use crate::daemon::listen::{Line, negotiate_with_peer};
use crate::daemon::relay;
use crate::daemon::shard_api::ShardHandle;
use crate::daemon::state::CacheOwner;

/// Connections of one borrower: one for each of its shards, and one for its tables. One more ends the oldest: a borrower whose machine
/// lost its power has left connections behind that nobody ends, and comes back with as many again.
pub(super) const CONNECTIONS_MAX: usize = 130;

/// Smallest loan, bytes.
const LOAN_BYTES_MIN: u64 = 64 << 20;

/// Loans there can be.
const LOANS_MAX: usize = 256;

/// What this host may lend.
#[derive(Debug)]
pub(crate) struct Lending {
    directory: PathBuf,
    bytes_max: u64,
    /// By borrower.
    loans: tokio::sync::Mutex<BTreeMap<String, Entry>>,
}

/// What is kept of a loan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    name: String,
    /// Of the borrower.
    certificate: String,
    size: Size,
    ended: bool,
}

#[derive(Debug)]
struct Entry {
    kept: Kept,
    open: Option<Open>,
}

/// A loan that a shard serves.
#[derive(Clone, Debug)]
struct Open {
    disk: DiskId,
    shard: ShardHandle,
    epoch: String,
    exports: Exports,
    places: Arc<Semaphore>,
    /// The connections, oldest first. Dropping one's sender ends it.
    connections: Arc<Mutex<VecDeque<oneshot::Sender<()>>>>,
}

/// A connection of a borrower that is let in.
#[derive(Debug)]
pub(crate) struct Admitted(Open);

impl Lending {
    /// Finds the loans that are in a directory, which is made if there is none.
    pub(crate) fn open(directory: &Path, bytes_max: u64) -> std::io::Result<Lending> {
        fs::create_dir_all(directory)?;
        let mut loans = BTreeMap::new();
        for file in fs::read_dir(directory)? {
            let path = file?.path();
            let stem = path.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned);
            let (Some(borrower), true) = (stem, path.extension().is_some_and(|it| it == "json")) else {
                continue;
            };
            match fs::read(&path).ok().and_then(|text| serde_json::from_slice::<Kept>(&text).ok()) {
                Some(kept) => {
                    loans.insert(borrower, Entry { kept, open: None });
                }
                None => {
                    tracing::error!("{} is no record of a loan, and nobody gets that loan", path.display())
                }
            }
        }
        let loans = tokio::sync::Mutex::new(loans);
        Ok(Lending { directory: directory.to_owned(), bytes_max, loans })
    }

    fn file(&self, borrower: &str) -> PathBuf {
        self.directory.join(format!("{borrower}.dev"))
    }

    /// Keeps what a loan is, durably.
    fn keep(&self, borrower: &str, kept: &Kept) -> std::io::Result<()> {
        let path = self.directory.join(format!("{borrower}.json"));
        let temporary = self.directory.join(format!("{borrower}.new"));
        let mut file = fs::File::create(&temporary)?;
        file.write_all(&serde_json::to_vec_pretty(kept)?)?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        fs::File::open(&self.directory)?.sync_all()
    }

    fn forget(&self, borrower: &str) -> std::io::Result<()> {
        remove(&self.file(borrower))?;
        fs::remove_file(self.directory.join(format!("{borrower}.json")))?;
        fs::File::open(&self.directory)?.sync_all()
    }

    fn view(&self, borrower: &str, entry: &Entry, lender: &str) -> Loan {
        Loan {
            borrower: borrower.to_owned(),
            name: entry.kept.name.clone(),
            lender: lender.to_owned(),
            size: entry.kept.size,
            state: match &entry.open {
                _ if entry.kept.ended => LoanState::Ended,
                Some(_) => LoanState::Open,
                None => LoanState::Idle,
            },
            path: self.file(borrower).to_string_lossy().into_owned(),
            epoch: entry.open.as_ref().map(|open| open.epoch.clone()),
        }
    }
}

impl Manager {
    /// Lends what that has. Once, before the start.
    pub(crate) fn set_lending(&self, lending: Lending) {
        let _ = self.lending.set(lending);
    }

    fn lending(&self) -> Result<&Lending, Refusal> {
        self.lending.get().ok_or_else(|| {
            Refusal::conflict("this host lends nothing")
                .hint("[peers] in its hob.toml says what it lends: lend and lend_max")
        })
    }

    /// What is lent.
    pub(super) async fn loans(&self) -> Vec<Loan> {
        let Some(lending) = self.lending.get() else { return Vec::new() };
        let (loans, me) = (lending.loans.lock().await, self.own_name());
        loans.iter().map(|(borrower, entry)| lending.view(borrower, entry, &me)).collect()
    }

    /// Another host wants to use flash of this one, or to go on doing so.
    pub(crate) async fn lend(
        &self,
        borrower: &str,
        ask: LoanAsk,
        certificate: Option<String>,
    ) -> Result<Loan, Refusal> {
        let lending = self.lending()?;
        let certificate = certificate.ok_or_else(no_certificate)?;
        if borrower.parse::<CacheOwner>().is_err() {
            return Err(Refusal::invalid(format!("'{borrower}' is no host's identity")));
        }
        let mut loans = lending.loans.lock().await;
        match loans.get(borrower).map(|entry| &entry.kept) {
            Some(kept) => check_again(kept, &ask, &certificate)?,
            None => {
                let lent: u64 = loans.values().map(|entry| entry.kept.size.bytes()).sum();
                check_room(lending, loans.len(), lent, ask.size)?;
                let kept = Kept { name: ask.name.clone(), certificate, size: ask.size, ended: false };
                let file = lending.file(borrower);
                blocking(move || make_file(&file, ask.size)).await??;
                lending.keep(borrower, &kept).map_err(|error| failed("keep the loan", &error))?;
                tracing::info!("{} is lent to {} ({borrower})", kept.size, kept.name);
                loans.insert(borrower.to_owned(), Entry { kept, open: None });
            }
        }
        let entry = loans.get_mut(borrower).ok_or_else(|| Refusal::failed("the loan has gone again"))?;
        if entry.open.is_none() {
            entry.open = Some(self.open_loan(lending.file(borrower)).await?);
        }
        Ok(lending.view(borrower, entry, &self.own_name()))
    }

    /// Gives a loan's file to a shard.
    async fn open_loan(&self, file: PathBuf) -> Result<Open, Refusal> {
        let options = self.backing_options.clone();
        let name = file.to_string_lossy().into_owned();
        let spec = name.clone();
        let (backing, datastore) = blocking(move || {
            let backing = Backing::open_file(&spec, Access::ReadWrite, &options)?;
            Ok::<_, hob_storage::backing::OpenError>((backing, datastore_of(&spec)))
        })
        .await?
        .map_err(|error| super::disks::refuse(&error))?;
        let info = backing.info().clone();
        let datastore = self.inner().datastore_id(&datastore, false)?;
        let shard = self.shard_for(datastore);
        let disk = self.inner().new_loan_id();
        let config = DiskConfig { size_bytes: info.size_bytes, access: Access::ReadWrite, datastore };
        if let Err(error) = shard.add_disk(disk, config, backing).await {
            self.inner().loan_disks.remove(&disk);
            return Err(error.into());
        }
        let exports = Exports::default();
        let info = export_info(&info, Access::ReadWrite);
        exports.insert(
            REMOTE_EXPORT,
            Export { of: name, disk, shard: shard.clone(), info, promote: Promote::Never },
        );
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let epoch = CacheOwner::random().to_string();
        Ok(Open { disk, shard, epoch, exports, places, connections: Arc::default() })
    }

    /// May a borrower connect to what it knows by that epoch?
    pub(crate) async fn admit_borrower(
        &self,
        borrower: &str,
        epoch: &str,
        certificate: Option<String>,
    ) -> Result<Admitted, Refusal> {
        let lending = self.lending()?;
        let certificate = certificate.ok_or_else(no_certificate)?;
        let loans = lending.loans.lock().await;
        let entry = loans.get(borrower).ok_or_else(|| no_loan(borrower))?;
        check_borrower(&entry.kept, &certificate)?;
        match &entry.open {
            Some(open) if open.epoch == epoch && !entry.kept.ended => Ok(Admitted(open.clone())),
            _ => Err(Refusal::conflict("the loan is not the one that was meant: it was closed since")),
        }
    }

    /// Ends a loan: the borrower can read and write it no more, from when this returns, and all it has written is in the file, of which the
    /// path is returned. The file stays for as long as its bytes are needed. `loan` is the device's name in its superblock, to be
    /// certain that it is that loan; the operator does not say.
    pub(super) async fn end_loan(&self, borrower: &str, loan: &str) -> Result<PathBuf, Refusal> {
        let lending = self.lending()?;
        let mut loans = lending.loans.lock().await;
        let entry = loans.get_mut(borrower).ok_or_else(|| no_loan(borrower))?;
        let file = lending.file(borrower);
        // Before it is opened again: a restart in between finds it ended.
        if !entry.kept.ended {
            let kept = Kept { ended: true, ..entry.kept.clone() };
            lending.keep(borrower, &kept).map_err(|error| failed("keep the loan's end", &error))?;
            entry.kept = kept;
        }
        if let Some(open) = entry.open.take() {
            open.exports.remove(REMOTE_EXPORT);
            open.shard.remove_disk(open.disk).await?;
            self.inner().loan_disks.remove(&open.disk);
            tracing::warn!("the loan of {} ({borrower}) is ended", entry.kept.name);
        }
        let uuid = uuid_of(file.clone()).await?;
        if !loan.is_empty() && uuid.as_deref() != Some(loan) {
            return Err(Refusal::conflict(format!("what is lent to {borrower} is not {loan}")));
        }
        Ok(file)
    }

    /// An operator ends a loan, or its borrower gives it back. Its file goes when nobody needs its bytes. A borrower whose loan an operator
    /// has ended gets no other one before that is forgotten.
    pub(crate) async fn loan_end(
        &self,
        borrower: &str,
        certificate: Option<String>,
        after: Ended,
    ) -> Result<Vec<String>, Refusal> {
        let lending = self.lending()?;
        let gives_back = {
            let loans = lending.loans.lock().await;
            let entry = loans.get(borrower).ok_or_else(|| no_loan(borrower))?;
            certificate.is_some_and(|certificate| certificate == entry.kept.certificate)
        };
        let file = self.end_loan(borrower, "").await?;
        if let Some(uuid) = uuid_of(file.clone()).await?
            && self.loan_is_needed(&uuid).await
        {
            return Ok(vec![
                "its borrower may need what it has there: the file stays until a disk of the cluster needs it no more".to_owned(),
            ]);
        }
        let mut loans = lending.loans.lock().await;
        let removed = match gives_back || after == Ended::Forgotten {
            true => lending.forget(borrower),
            false => remove(&file),
        };
        removed.map_err(|error| failed("remove the loan's file", &error))?;
        if gives_back || after == Ended::Forgotten {
            loans.remove(borrower);
            tracing::info!("what was lent to {borrower} is free");
            return Ok(Vec::new());
        }
        if let Some(entry) = loans.get_mut(borrower) {
            entry.kept.size = Size(0);
            lending.keep(borrower, &entry.kept).map_err(|error| failed("keep the loan's end", &error))?;
        }
        tracing::info!("what was lent to {borrower} is free, and nothing more is lent to it");
        Ok(vec![format!(
            "nothing more is lent to that host; 'hob peer end {borrower} --forget' lets it ask again"
        )])
    }
}

/// What becomes of a loan that is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Its borrower gets no other one.
    Known,
    /// It may ask again.
    Forgotten,
}

/// Removes a file, if it is there.
fn remove(file: &Path) -> std::io::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl Open {
    /// Counts one more connection; the oldest ends if there are too many. What is returned ends when this one is to.
    fn enter(&self) -> oneshot::Receiver<()> {
        let (stay, over) = oneshot::channel();
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.retain(|stay| !stay.is_closed());
        connections.push_back(stay);
        if connections.len() > CONNECTIONS_MAX {
            connections.pop_front();
        }
        over
    }
}

impl Admitted {
    /// Serves a borrower over this connection until one of them leaves, or too many others have come.
    pub(crate) async fn serve(self, stream: impl AsyncRead + AsyncWrite + Unpin) -> std::io::Result<()> {
        let over = self.0.enter();
        tokio::select! {
            served = self.serve_here(stream) => served,
            _ = over => Err(std::io::Error::other("the borrower has made too many connections since")),
        }
    }

    async fn serve_here(self, mut stream: impl AsyncRead + AsyncWrite + Unpin) -> std::io::Result<()> {
        let Admitted(open) = self;
        // The shard gives back the place of one that has ended as soon as it has closed it.
        let place = open.places.clone().acquire_owned().await.map_err(std::io::Error::other)?;
        let visible =
            Visible { exports: open.exports.clone(), allow: AllowList::default(), peer: Peer::default() };
        let Some((negotiated, leftover)) = negotiate_with_peer(&mut stream, &visible).await? else {
            return Ok(());
        };
        // The loan may have been ended meanwhile.
        let Some(Export { disk, shard, promote, .. }) = visible.get(&negotiated.export) else {
            return Ok(());
        };
        let (near, far) = UnixStream::pair()?;
        let seat = (Line::Relayed, Arc::new(place));
        shard
            .attach(disk, OwnedFd::from(far.into_std()?), negotiated, leftover, promote, seat)
            .map_err(std::io::Error::other)?;
        relay::relay(stream, near).await;
        Ok(())
    }
}

impl Inner {
    /// An id for a disk that nobody but a borrower sees.
    fn new_loan_id(&mut self) -> DiskId {
        let id = self.new_disk_id();
        self.loan_disks.insert(id);
        id
    }
}

fn check_borrower(kept: &Kept, certificate: &str) -> Result<(), Refusal> {
    if kept.certificate == certificate {
        return Ok(());
    }
    Err(Refusal::conflict(format!("that loan is {}'s, which shows another certificate", kept.name)))
}

/// May a loan that is there be used as it is asked for?
fn check_again(kept: &Kept, ask: &LoanAsk, certificate: &str) -> Result<(), Refusal> {
    check_borrower(kept, certificate)?;
    if kept.ended {
        return Err(Refusal::conflict("its operator has ended the loan")
            .hint("'hob peer end BORROWER --forget' there lets this host ask again"));
    }
    if kept.size != ask.size {
        return Err(Refusal::conflict(format!("{} are lent to {} already", kept.size, kept.name))
            .hint("give that back first: take the device out of its pool"));
    }
    Ok(())
}

fn check_room(lending: &Lending, loans: usize, lent: u64, size: Size) -> Result<(), Refusal> {
    if size.bytes() < LOAN_BYTES_MIN {
        return Err(Refusal::invalid(format!("a loan has at least {}", Size(LOAN_BYTES_MIN))));
    }
    let left = lending.bytes_max.saturating_sub(lent);
    if size.bytes() > left || loans >= LOANS_MAX {
        return Err(Refusal::conflict(format!(
            "{} of the {} that this host lends are left",
            Size(left),
            Size(lending.bytes_max)
        )));
    }
    Ok(())
}

/// Makes the file of a loan, all of its room reserved.
fn make_file(path: &Path, size: Size) -> Result<(), Refusal> {
    let file = fs::OpenOptions::new().write(true).create(true).truncate(true).open(path);
    let file = file.map_err(|error| failed("make the loan's file", &error))?;
    let made = rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(0o600))
        .and_then(|()| rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, size.bytes()))
        .map_err(std::io::Error::from)
        .and_then(|()| file.sync_all());
    made.map_err(|error| {
        let _ = fs::remove_file(path);
        failed("reserve the loan's room", &error)
    })
}

/// What the superblock in a loan's file calls it, if it has one.
async fn uuid_of(file: PathBuf) -> Result<Option<String>, Refusal> {
    blocking(move || superblock_uuid(&file).map(|uuid| uuid.to_string())).await
}

fn failed(what: &str, error: &std::io::Error) -> Refusal {
    Refusal { kind: Kind::Failed, problem: Problem::new(format!("cannot {what}: {error}")) }
}

fn no_certificate() -> Refusal {
    Refusal::conflict("flash is lent over TLS, to hosts that show a certificate")
}

fn no_loan(borrower: &str) -> Refusal {
    Refusal::not_found(format!("nothing is lent to {borrower}")).hint("'hob peer list' shows all loans")
}
