//! API handlers that compare hob.toml with the running daemon.

use hob_control::{ConfigApplied, ConfigApply, ConfigDiff};

use super::endpoints::endpoints;

endpoints! { services;
    /// Compares the current hob.toml with the running daemon.
    get "/v1/config/diff"
    config_diff() -> ConfigDiff, "4XX", "5XX" {
        services.hob_toml.diff().await
    }

    /// Applies hob.toml to the running daemon. Dirty data is drained, never lost.
    post "/v1/config/apply"
    config_apply(; apply: ConfigApply) -> ConfigApplied, "4XX", "5XX" {
        services.hob_toml.apply(apply.yes).await
    }
}
