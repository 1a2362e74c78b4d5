//! API types for swap areas of the host in pools.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Size;

/// A swap area of this host in a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Swap {
    /// Name of the swap area.
    pub name: String,
    /// The pool that contains the swap area.
    pub pool: String,
    /// Path of the pool device that contains the swap area.
    pub device: String,
    /// Flash that the swap area occupies, in whole segments.
    pub size: Size,
    /// State of the swap area.
    pub state: SwapState,
    /// Why the swap area's state differs from the configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether the daemon turns the swap area on when it starts.
    pub at_start: bool,
    /// Amount of swapped-out data in the area.
    pub used: Size,
    /// Remaining work: bytes to write while `preparing`, bytes to read back while `turning-off`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<Size>,
    /// Configured priority; if the area is on, its actual priority. The kernel fills areas of
    /// higher priority first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// Path of the loop device that the kernel swaps to, while the area is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loop_device: Option<String>,
}

/// State of a swap area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SwapState {
    /// The kernel does not use the swap area.
    Off,
    /// hob writes the whole area once, so that its file has no holes, and then turns it on.
    Preparing,
    /// The kernel uses the swap area.
    On,
    /// The kernel reads the swapped-out data back into memory.
    TurningOff,
    /// The device that contains the swap area is missing.
    Unavailable,
}

impl SwapState {
    /// Returns true if the state will soon change without a request.
    pub fn is_passing(self) -> bool {
        matches!(self, SwapState::Preparing | SwapState::TurningOff)
    }
}

/// `POST /v1/swap`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SwapCreate {
    /// Name of the swap area; `swap0`, `swap1` … if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Pool that will contain the swap area. Absent: the only pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Path of the pool device that will contain the swap area. Absent: the device with the most
    /// free space.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Size of the swap area, rounded up to whole segments.
    pub size: Size,
    /// Swap priority, 0 to 32767; areas of higher priority are filled first. If absent, the kernel
    /// chooses a priority below 0, so the area is filled after all areas with a priority.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u16>,
    /// Create the swap area, but do not turn it on.
    #[serde(default)]
    pub off: bool,
}

/// `PATCH /v1/swap/{swap}`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SwapPatch {
    /// Whether the kernel uses the swap area, now and after each start of the daemon. `true` also
    /// cancels turning the area off.
    pub on: bool,
    /// Turn the area off even if the swapped-out data may not fit in memory.
    #[serde(default)]
    pub force: bool,
}

/// A swap area after a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SwapChanged {
    /// The changed swap area; absent if it was removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swap: Option<Swap>,
    /// Deviations of the result from the request, as sentences.
    pub notes: Vec<String>,
}

/// Flash of a pool that a swap area occupies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SwapRoom {
    /// Name of the swap area.
    pub name: String,
    /// Flash that the swap area occupies.
    pub size: Size,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_survives_json_and_requests_refuse_unknown_fields() {
        let swap = Swap {
            name: "swap0".into(),
            pool: "fast".into(),
            device: "/dev/nvme0n1".into(),
            size: Size(8 << 30),
            state: SwapState::TurningOff,
            reason: None,
            at_start: true,
            used: Size(4096),
            left: Some(Size(4096)),
            priority: Some(-2),
            loop_device: Some("/dev/loop7".into()),
        };
        let text = serde_json::to_string(&swap).unwrap();
        assert!(text.contains(r#""state":"turning-off""#), "{text}");
        assert_eq!(serde_json::from_str::<Swap>(&text).unwrap(), swap);
        let create: SwapCreate = serde_json::from_str(r#"{"size":"8G"}"#).unwrap();
        assert_eq!(create, SwapCreate { size: Size(8 << 30), ..SwapCreate::default() });
        assert!(serde_json::from_str::<SwapPatch>(r#"{"on":false,"forse":true}"#).is_err());
    }
}
