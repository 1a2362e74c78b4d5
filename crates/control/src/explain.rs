//! Why a disk's I/O is, or is not, served from flash — in sentences.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::CacheState;

/// The answer to `hob explain DISK`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    /// Name of the disk.
    pub disk: String,
    /// State of its cache.
    pub cache: CacheState,
    /// Plain sentences, the most important first.
    pub sentences: Vec<String>,
    /// Guest requests since counting began.
    pub requests: u64,
    /// Share of the requests that flash served, percent.
    pub served_from_flash_percent: f64,
    /// Percentage of requests served entirely from memory above flash.
    #[serde(default)]
    pub served_from_memory_percent: f64,
    /// Why the others were not, most frequent first.
    pub not_served: Vec<Share>,
}

/// One reason and its share of all requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Share {
    /// The outcome's class.
    pub class: String,
    /// The reason inside the class; empty where the class says it all.
    pub reason: String,
    /// Requests.
    pub count: u64,
    /// Percentage of all requests of the disk.
    pub percent: f64,
    /// The finding as a sentence.
    pub sentence: String,
}
