//! API types for remote flash: flash that one host lends to another for replicas.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Size;

/// `GET /v1/peers`: flash that this host exports to other hosts, and remote flash that it uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Peers {
    /// Lent to others.
    pub lent: Vec<Loan>,
    /// Borrowed from others.
    pub borrowed: Vec<Borrowed>,
}

/// A lease of this host's flash to another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Loan {
    /// Random identity of the host that uses the flash.
    pub borrower: String,
    /// Name of the host that uses the flash.
    pub name: String,
    /// Name of the host that lends the flash: its cluster name, if it is in a cluster.
    pub lender: String,
    /// Bytes.
    pub size: Size,
    /// Its state.
    pub state: LoanState,
    /// Path of the file that holds the borrower's data.
    pub path: String,
    /// Incarnation of the flash lease. The incarnation changes when unflushed writes may have been
    /// lost. A connection belongs to one incarnation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<String>,
}

/// State of a lease of flash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LoanState {
    /// No host has requested the lease since this daemon started.
    Idle,
    /// The borrower can use the flash.
    Open,
    /// The lease was ended, and the borrower can no longer use the flash.
    Ended,
}

/// `POST /v1/loans/{borrower}`: another host requests a lease of this host's flash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LoanAsk {
    /// Name of the requesting host.
    pub name: String,
    /// How much, bytes.
    pub size: Size,
}

/// A pool device on another host's flash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Borrowed {
    /// The pool.
    pub pool: String,
    /// HOST:PORT of the control API of the host that lends the flash.
    pub peer: String,
    /// Path that names the device in the pool.
    pub path: String,
    /// Bytes.
    pub size: Size,
    /// Whether caches can use the device.
    pub state: crate::DeviceState,
    /// Why not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Disks whose replicas are on the device.
    pub disks: Vec<String>,
}
