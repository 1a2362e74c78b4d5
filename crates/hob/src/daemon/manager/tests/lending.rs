//! What this host lends to others.

use std::time::Duration;

use hob_control::{Loan, LoanAsk};
use tokio::io::{AsyncReadExt, DuplexStream};

use super::*;
use crate::daemon::manager::lending::CONNECTIONS_MAX;

/// A borrower.
const A: &str = "0000000000000000000000000000000a";

/// A host that lends up to 128 MiB.
fn lends(test: impl AsyncFnOnce(Bench)) {
    run(async |bench| {
        bench.reads_loans();
        test(bench).await;
    });
}

impl Bench {
    fn reads_loans(&self) {
        self.manager.set_lending(Lending::open(&self.dir.path().join("lent"), 128 * MIB).unwrap());
    }

    async fn lend(&self, borrower: &str) -> Result<Loan, Refusal> {
        let ask = LoanAsk { name: "host".into(), size: Size(64 * MIB) };
        self.manager.lend(borrower, ask, Some("cn:host".into())).await
    }

    /// A connection of that borrower.
    async fn connect(&self, borrower: &str, loan: &Loan) -> DuplexStream {
        let epoch = loan.epoch.as_deref().unwrap();
        let admitted = self.manager.admit_borrower(borrower, epoch, Some("cn:host".into())).await.unwrap();
        let (here, there) = tokio::io::duplex(4096);
        tokio::spawn(admitted.serve(there));
        here
    }
}

/// The greeting of an NBD server comes in; what comes after it, is not waited for.
async fn is_greeted(connection: &mut DuplexStream) -> bool {
    connection.read_exact(&mut [0; 18]).await.is_ok()
}

/// Of a machine that lost its power nobody hears: its connections stay until it comes back, and makes as many again.
#[test]
fn connections_that_nobody_ends_shut_nobody_out() {
    lends(async |bench| {
        let loan = bench.lend(A).await.unwrap();
        let mut left = Vec::new();
        for _ in 0..CONNECTIONS_MAX {
            let mut connection = bench.connect(A, &loan).await;
            assert!(is_greeted(&mut connection).await);
            left.push(connection);
        }
        let mut again = bench.connect(A, &loan).await;
        assert!(is_greeted(&mut again).await, "it has a place");
        let ended = left[0].read(&mut [0]).await.unwrap();
        assert_eq!(ended, 0, "the oldest one has ended");
        let others = tokio::time::timeout(Duration::from_secs(1), left[1].read(&mut [0])).await;
        assert!(others.is_err(), "and no other");
    });
}
