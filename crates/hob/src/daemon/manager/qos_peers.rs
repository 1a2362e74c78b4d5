//! QoS across hosts: the [`QosService`](super::qos::QosService) agrees on datastores with the hosts
//! of the cluster.

use std::sync::Arc;

use super::Manager;
use super::api_error::ApiError;

impl Manager {
    /// Starts an agreement on every latency-controlled datastore that several shards or hosts use.
    pub(super) fn agree_on_datastores(self: &Arc<Self>) {
        let shards_min = if self.cluster().is_some() { 1 } else { 2 };
        for name in self.qos.latency_controlled(shards_min) {
            let manager = self.clone();
            tokio::spawn(async move {
                let cluster = manager.cluster();
                let exchange = async |report| match &cluster {
                    Some(cluster) => {
                        let told = cluster.exchange(&name, &report).await;
                        told.map_err(|error| ApiError::failed(error.to_string()))
                    }
                    None => Ok(Vec::new()),
                };
                if let Err(error) = manager.qos.agree_on(&name, exchange).await {
                    tracing::debug!("datastore {name}: {error}");
                }
            });
        }
    }
}
