//! Why a disk's I/O is, or is not, served from flash — in sentences.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::CacheState;

/// What `hob explain DISK` says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    /// Which disk.
    pub disk: String,
    /// What its cache is doing.
    pub cache: CacheState,
    /// Plain sentences, the most important first.
    pub sentences: Vec<String>,
    /// Guest requests since counting began.
    pub requests: u64,
    /// Share of the requests that flash served, percent.
    pub served_from_flash_percent: f64,
    /// Of the requests, percent that memory above flash served whole.
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
    /// Of all requests of the disk, percent.
    pub percent: f64,
    /// As a sentence.
    pub sentence: String,
}
