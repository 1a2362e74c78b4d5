//! API types that explain why a disk's I/O is, or is not, served from flash.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::CacheState;

/// The answer to `hob explain DISK`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    /// Name of the disk.
    pub disk: String,
    /// State of the disk's cache.
    pub cache: CacheState,
    /// The explanation as sentences, most important first.
    pub sentences: Vec<String>,
    /// Requests of the guest since the disk came online or its statistics were last reset.
    pub requests: u64,
    /// Percentage of requests that flash served.
    pub served_from_flash_percent: f64,
    /// Percentage of requests served entirely from memory above flash.
    #[serde(default)]
    pub served_from_memory_percent: f64,
    /// Why requests were served neither from flash nor from memory, most frequent reason first.
    pub not_served: Vec<Share>,
}

/// One reason, and its share of all requests of the disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Share {
    /// The outcome's class.
    pub class: String,
    /// Reason within the class; empty if the class is the whole reason.
    pub reason: String,
    /// Number of requests with this reason.
    pub count: u64,
    /// Percentage of all requests of the disk.
    pub percent: f64,
    /// The reason and its share as a sentence.
    pub sentence: String,
}
