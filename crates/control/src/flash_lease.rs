//! Flash that hosts lend each other for second copies.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Size;

/// `GET /v1/peers`: flash that this host exports to other hosts, and flash that it uses of theirs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Peers {
    /// Lent to others.
    pub lent: Vec<FlashLease>,
    /// Borrowed from others.
    pub borrowed: Vec<RemoteFlash>,
}

/// Flash of this host that another one uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FlashLease {
    /// Tells the borrower from all other hosts.
    pub borrower: String,
    /// Name of the host that uses the flash.
    pub name: String,
    /// Name of the host that has the flash, in its cluster if it is in one.
    pub lender: String,
    /// Bytes.
    pub size: Size,
    /// Its state.
    pub state: FlashLeaseState,
    /// Path of the file.
    pub path: String,
    /// Incarnation: it changes when unflushed writes may have been lost. A connection belongs to
    /// one incarnation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<String>,
}

/// How a loan is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FlashLeaseState {
    /// Nobody has asked for it since this daemon started.
    Idle,
    /// It can be used.
    Open,
    /// It was ended: the borrower can use it no more.
    Ended,
}

/// `POST /v1/loans/{borrower}`: a request of another host to use flash of this one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FlashLeaseRequest {
    /// Name of the requesting host.
    pub name: String,
    /// How much, bytes.
    pub size: Size,
}

/// A device of a pool that is on another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemoteFlash {
    /// The pool.
    pub pool: String,
    /// HOST:PORT of the control API of the host that has it.
    pub peer: String,
    /// Path of the device in the pool.
    pub path: String,
    /// Bytes.
    pub size: Size,
    /// Whether it can be used.
    pub state: crate::DeviceState,
    /// Why not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Disks whose second copies are there.
    pub disks: Vec<String>,
}
