//! Swap of the host on flash.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Size;

/// A swap area of this host in a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Swap {
    /// Its name.
    pub name: String,
    /// The pool that it is carved from.
    pub pool: String,
    /// The device of the pool that it is on.
    pub device: String,
    /// Room that it takes, in whole segments.
    pub size: Size,
    /// Its state.
    pub state: SwapState,
    /// Why its state differs from the configuration, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether it is turned on when the daemon starts.
    pub at_start: bool,
    /// Swapped-out data on it.
    pub used: Size,
    /// Remaining work: bytes to write while `preparing`, bytes to bring back while `turning-off`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<Size>,
    /// The requested priority, or the kernel's choice if it is on. Areas of higher priority are
    /// filled first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// The loop device that the kernel swaps to, while it is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loop_device: Option<String>,
}

/// State of a swap area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SwapState {
    /// The kernel does not swap to it.
    Off,
    /// It is written once, so that it has no holes, and then turned on.
    Preparing,
    /// The kernel swaps to it.
    On,
    /// Swapped-out data is brought back.
    TurningOff,
    /// Its device is not there.
    Unavailable,
}

impl SwapState {
    /// Returns true if the state will change by itself soon.
    pub fn is_passing(self) -> bool {
        matches!(self, SwapState::Preparing | SwapState::TurningOff)
    }
}

/// `POST /v1/swap`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SwapCreate {
    /// Its name; `swap0`, `swap1` … if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The pool to carve it from; may be absent if there is only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Path of the device of the pool; the one with the most room if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// How large, rounded up to whole segments.
    pub size: Size,
    /// 0 to 32767, higher ones are filled first; the kernel chooses one below all of these if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u16>,
    /// Leave it off.
    #[serde(default)]
    pub off: bool,
}

/// `PATCH /v1/swap/{swap}`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SwapPatch {
    /// Whether the kernel swaps to it, now and after each start of the daemon. `true` stops a
    /// turning-off that is under way.
    pub on: bool,
    /// Turn it off even if memory may not have room for the swapped-out data.
    #[serde(default)]
    pub force: bool,
}

/// A swap area after a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SwapChanged {
    /// The area; absent when it was removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swap: Option<Swap>,
    /// Deviations from the request, as sentences.
    pub notes: Vec<String>,
}

/// Space of a swap area in a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SwapRoom {
    /// The area's name.
    pub name: String,
    /// Room that it takes.
    pub size: Size,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_survives_json_and_requests_refuse_what_they_do_not_know() {
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
