//! Flash leases between hosts, for replicas of dirty data.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Size;

/// `GET /v1/peers`: flash that this host lends to other hosts, and flash of other hosts that this
/// host uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Peers {
    /// Flash that this host lends to other hosts.
    pub lent: Vec<FlashLease>,
    /// Flash of other hosts that this host uses.
    pub borrowed: Vec<RemoteFlash>,
}

/// A flash lease: space on this host's flash that another host may use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FlashLease {
    /// Identity of the borrower.
    pub borrower: String,
    /// Name of the host that uses the flash.
    pub name: String,
    /// Name of the host that has the flash; its name in the cluster, if it is in one.
    pub lender: String,
    /// Size of the leased flash.
    pub size: Size,
    /// Whether the borrower can use the flash.
    pub state: FlashLeaseState,
    /// Path of the file on the lender.
    pub path: String,
    /// Incarnation of the flash lease, which changes when unflushed writes may have been lost. A
    /// connection belongs to one incarnation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<String>,
}

/// State of a flash lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FlashLeaseState {
    /// The borrower has not requested the flash lease since the lender's daemon started.
    Idle,
    /// The borrower can use the flash.
    Open,
    /// The flash lease was ended, and the borrower can no longer use the flash.
    Ended,
}

/// `POST /v1/loans/{borrower}`: a request of another host for a flash lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FlashLeaseRequest {
    /// Name of the requesting host.
    pub name: String,
    /// Requested size of the flash.
    pub size: Size,
}

/// A pool device on another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemoteFlash {
    /// Name of the pool.
    pub pool: String,
    /// HOST:PORT of the lender's control API.
    pub peer: String,
    /// Path of the device in the pool.
    pub path: String,
    /// Size of the device.
    pub size: Size,
    /// State of the device.
    pub state: crate::DeviceState,
    /// Reason why the device cannot be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Disks whose replicas are on the device.
    pub disks: Vec<String>,
}
