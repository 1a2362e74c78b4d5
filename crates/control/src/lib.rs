//! The control API of the hob daemon: types of requests and responses, and a client.
//!
//! The daemon sends these types and the command line reads them. The OpenAPI document is generated
//! from these types. Requests with unknown fields are refused, so a misspelt setting is an error.
//! Sizes are [`Size`]. Latencies are in nanoseconds, as their names say.

mod backing;
mod backing_timeout;
mod bitmap;
mod changes;
pub mod client;
mod cluster;
mod config;
mod connection;
mod drain;
mod endpoint;
mod error;
pub mod etcd;
mod event;
mod explain;
mod export;
mod flash_lease;
mod flash_writes;
mod forward;
mod health;
mod histograms;
mod load;
mod migration;
mod name;
mod named;
mod parse_error;
pub mod peer;
pub mod pem;
mod placement;
mod preview;
mod qos;
mod resources;
mod settings;
mod size;
mod sizing;
mod snapshot;
mod stats;
mod swap;
mod system_error;
mod tasks;
mod text;
mod tls;
mod trace;

pub use backing::BackingState;
pub use backing_timeout::{BackingTimeout, BackingTimeoutChange, BackingTimeoutError};
pub use bitmap::{BITMAPS_MAX, Bitmap, BitmapAdd, BitmapMerge, BitmapRotate, BitmapState, Bitmaps};
pub use changes::{
    DeviceAdd, DevicePatch, DiskAdd, DiskChanged, DiskPatch, DiskResize, PoolChanged, PoolCreate, PoolPatch,
};
pub use cluster::{
    Cluster, ClusterDisk, ClusterDiskState, ClusterHost, ClusterPool, ClusterState, ClusterTake,
};
pub use config::{ConfigApplied, ConfigApply, ConfigDiff, ConfigDifference, ConfigRemedy};
pub use drain::DrainFor;
pub use endpoint::{Endpoint, EndpointParseError};
pub use error::Problem;
pub use event::{EVENTS, Effect, EventInfo, EventReport, LifeEvent};
pub use explain::{Explanation, Share};
pub use export::Export;
pub use flash_lease::{FlashLease, FlashLeaseRequest, FlashLeaseState, Peers, RemoteFlash};
pub use flash_writes::{
    CacheFlashWrites, FlashWrites, FlashWritesChange, FlashWritesParseError, FlashWritesUsage,
};
pub use forward::Forwarded;
pub use health::{Health, HealthProblem, HealthStatus, ProblemKind};
pub use histograms::{DiskHistograms, RequestBucket, RequestHistogram};
pub use load::DiskLoad;
pub use migration::{
    Arrival, ArrivingCache, ArrivingSettings, CallAnswer, CallRefusal, CarryMode, CarrySession, Migration,
    MigrationStart, MigrationState, Side, Switch, TakeBack,
};
pub use name::{NAME_CHARS_MAX, NameError, check_name};
pub use parse_error::without_type_names;
pub use placement::{
    AdvisedDisk, AdvisedHost, AdvisedMove, AdvisedStay, ClusterAdvice, ClusterMove, ClusterMoveStart,
    ClusterMoveState,
};
pub use preview::{OnClients, PlannedChange, PlannedPoolChange, Preview};
pub use qos::{Datastore, DatastorePatch, DiskQos, Qos, QosPatch, StoragePolicy};
pub use resources::{
    Admission, Cache, CacheState, Device, DeviceState, Disk, DiskState, IoMode, Orphan, Pool, Recording,
    SharedCache, SharedCapacity, SharedLimits, Verification, Version,
};
pub use settings::{
    AdoptCache, CacheEnable, CachePatch, CacheSettings, Dirty, ExportDirty, OnDirty, parse_shares,
};
pub use size::{Size, SizeParseError};
pub use sizing::{BlockCurve, CurveCache, CurvePoint, DiskCurve, RecentReads};
pub use snapshot::{DeviceFigures, DiskFigures, DiskNow, IoFigures, OutcomeFigures, PoolNow, Snapshot};
pub use stats::{
    Bucket, CacheCandidate, CacheChoice, DiskStats, Evictions, Latency, OutcomeStats, VsphereStats,
};
pub use swap::{Swap, SwapChanged, SwapCreate, SwapPatch, SwapRoom, SwapState};
pub use system_error::without_error_numbers;
pub use tasks::{Task, TaskState};
pub use tls::{ClientTls, ClientTlsError};
pub use trace::{FRAME_RECORDS_MAX, TraceDecoder, TraceFrame, TraceOp, TraceRecord, TraceStreamError};
