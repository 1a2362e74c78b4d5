//! Flash that hosts lend each other for second copies.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Size;

/// `GET /v1/peers`: what this host lends, and what it has borrowed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Peers {
    /// Lent to others.
    pub lent: Vec<Loan>,
    /// Borrowed from others.
    pub borrowed: Vec<Borrowed>,
}

/// Flash of this host that another one uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Loan {
    /// Tells the borrower from all other hosts.
    pub borrower: String,
    /// What the borrower calls itself.
    pub name: String,
    /// What the lender calls itself, in its cluster if it is in one.
    pub lender: String,
    /// Bytes.
    pub size: Size,
    /// How it is.
    pub state: LoanState,
    /// Where it lies.
    pub path: String,
    /// Changes whenever what was written and not flushed may be lost; a connection belongs to one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<String>,
}

/// How a loan is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LoanState {
    /// Nobody has asked for it since this daemon started.
    Idle,
    /// It can be used.
    Open,
    /// It was ended: the borrower can use it no more.
    Ended,
}

/// `POST /v1/loans/{borrower}`: of another host that wants to use flash of this one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LoanAsk {
    /// What it calls itself.
    pub name: String,
    /// How much, bytes.
    pub size: Size,
}

/// A device of a pool that is on another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Borrowed {
    /// The pool.
    pub pool: String,
    /// Whose it is: HOST:PORT of its control API.
    pub peer: String,
    /// As the pool calls it.
    pub path: String,
    /// Bytes.
    pub size: Size,
    /// Can it be used?
    pub state: crate::DeviceState,
    /// Why not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Disks whose second copies are there.
    pub disks: Vec<String>,
}
