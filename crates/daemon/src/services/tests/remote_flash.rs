//! Flash that this host lends to others.

use std::time::Duration;

use hob_control::{FlashLease, FlashLeaseRequest, FlashLeaseState};
use tokio::io::{AsyncReadExt, DuplexStream};

use super::*;
use crate::services::remote_flash::{Admitted, CONNECTIONS_MAX};

/// Identities of two borrowers.
const A: &str = "0000000000000000000000000000000a";
const B: &str = "0000000000000000000000000000000b";

/// A host that lends up to 128 MiB.
fn lends(test: impl AsyncFnOnce(Bench)) {
    run(async |bench| {
        bench.reads_leases();
        test(bench).await;
    });
}

impl Bench {
    fn reads_leases(&self) {
        self.services
            .remote_flash
            .set_exports(FlashExports::open(&self.dir.path().join("lent"), 128 * MIB).unwrap());
    }

    async fn lend(&self, borrower: &str) -> Result<FlashLease> {
        let ask = FlashLeaseRequest { name: "host".into(), size: Size(64 * MIB) };
        self.services.remote_flash.lend(borrower.to_owned(), ask, Some("cn:host".into())).await
    }

    fn admit(&self, borrower: &str, lease: &FlashLease) -> Result<Admitted> {
        self.services.remote_flash.admit(borrower, lease.epoch.as_deref().unwrap(), Some("cn:host".into()))
    }

    /// Opens a connection of that borrower.
    async fn connect(&self, borrower: &str, lease: &FlashLease) -> DuplexStream {
        let admitted = self.admit(borrower, lease).unwrap();
        let (here, there) = tokio::io::duplex(4096);
        tokio::spawn(admitted.serve(there));
        here
    }

    fn file(&self, borrower: &str) -> PathBuf {
        self.dir.path().join(format!("lent/{borrower}.dev"))
    }
}

/// Returns true if the greeting of an NBD server arrives.
async fn is_greeted(connection: &mut DuplexStream) -> bool {
    connection.read_exact(&mut [0; 18]).await.is_ok()
}

/// A borrower that loses its power does not close its connections. The lending host keeps them
/// until the borrower returns and opens as many new ones.
#[test]
fn open_connections_without_a_client_do_not_block_new_ones() {
    lends(async |bench| {
        let lease = bench.lend(A).await.unwrap();
        let mut left = Vec::new();
        for _ in 0..CONNECTIONS_MAX {
            let mut connection = bench.connect(A, &lease).await;
            assert!(is_greeted(&mut connection).await);
            left.push(connection);
        }
        let mut again = bench.connect(A, &lease).await;
        assert!(is_greeted(&mut again).await, "it has a place");
        let ended = left[0].read(&mut [0]).await.unwrap();
        assert_eq!(ended, 0, "the oldest one has ended");
        let others = tokio::time::timeout(Duration::from_secs(1), left[1].read(&mut [0])).await;
        assert!(others.is_err(), "and no other");
    });
}

/// A borrower waits no longer than its timeout, and its request is nevertheless completed.
#[test]
fn a_flash_export_is_made_even_if_its_client_has_gone() {
    lends(async |bench| {
        bench.shard.set_hangs(true);
        let asked = tokio::time::timeout(Duration::from_secs(6), bench.lend(A)).await;
        assert!(asked.is_err(), "{asked:?}");
        assert_eq!(bench.services.pools.peers().lent.len(), 1, "what is lent can be seen meanwhile");
        assert_eq!(bench.lend(A).await.unwrap_err().kind, ErrorKind::Busy);
        bench.shard.set_hangs(false);
        let lease = loop {
            match bench.lend(A).await {
                Ok(lease) => break lease,
                Err(error) => assert_eq!(error.kind, ErrorKind::Busy, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        assert_eq!(bench.services.registry.inner().lease_disks.len(), 1, "its file is served once");
        assert!(is_greeted(&mut bench.connect(A, &lease).await).await);
    });
}

/// If flash does not finish a borrower's I/O, only the end of this borrower's lease is delayed.
#[test]
fn a_flash_export_that_does_not_end_blocks_no_other() {
    lends(async |bench| {
        let (lease, other) = (bench.lend(A).await.unwrap(), bench.lend(B).await.unwrap());
        bench.shard.set_hangs(true);
        let services = bench.services.clone();
        let ending =
            tokio::spawn(async move { services.remote_flash.end(A.into(), None, Ended::Known).await });
        while bench.services.pools.peers().lent[0].state != FlashLeaseState::Ended {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let mut connection = bench.connect(B, &other).await;
        assert!(is_greeted(&mut connection).await);
        assert!(bench.admit(A, &lease).is_err(), "a lease that is ending admits no client");
        bench.shard.set_hangs(false);
        ending.await.unwrap().unwrap();
        assert!(!bench.file(A).exists() && bench.file(B).exists());
    });
}

/// If an operator ended a flash lease, the lending host keeps the record of the lease. Otherwise
/// the lending host removes the record, with a message, as soon as the lease's data is not needed.
#[test]
fn an_ended_loan_is_lent_again_unless_an_operator_ended_it() {
    for (ended, said) in [
        (r#""adoption""#, "fail over"),
        (r#""return""#, "was returned"),
        (r#""operator""#, "operator"),
        ("true", "operator"),
    ] {
        run(async |bench| {
            // As after a crash, or after an adoption that failed.
            let lent = bench.dir.path().join("lent");
            std::fs::create_dir(&lent).unwrap();
            let record =
                format!(r#"{{"name":"host","certificate":"cn:host","size":67108864,"ended":{ended}}}"#);
            std::fs::write(lent.join(format!("{A}.json")), record).unwrap();
            std::fs::File::create(bench.file(A)).unwrap().set_len(MIB).unwrap();
            bench.reads_leases();
            let refused = bench.lend(A).await.unwrap_err().to_string();
            assert!(refused.contains(said), "{ended}: {refused}");
            bench.services.remote_flash.free_ended().await;
            assert!(!bench.file(A).exists(), "{ended}: its room is free");
            let again = bench.lend(A).await;
            assert_eq!(again.is_ok(), said != "operator", "{ended}: {again:?}");
        });
    }
}
