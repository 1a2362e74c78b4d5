//! Shares, limits and reservations of disks, and the datastores that they share.

use hyper::Method;

use super::{Client, ClientError, disk_path, percent_encode};
use crate::{Datastore, DatastorePatch, DiskQos, QosPatch, StoragePolicy};

impl Client {
    /// Entitlements of all disks.
    pub async fn qos_list(&self) -> Result<Vec<DiskQos>, ClientError> {
        self.get("/v1/qos").await
    }

    /// The entitlement of a disk.
    pub async fn qos(&self, disk: &str) -> Result<DiskQos, ClientError> {
        self.get(&format!("{}/qos", disk_path(disk))).await
    }

    /// Changes the entitlement of a disk.
    pub async fn qos_set(&self, disk: &str, patch: &QosPatch) -> Result<DiskQos, ClientError> {
        self.send(Method::PATCH, &format!("{}/qos", disk_path(disk)), Some(patch)).await
    }

    /// All storage policies.
    pub async fn storage_policies(&self) -> Result<Vec<StoragePolicy>, ClientError> {
        self.get("/v1/storage-policies").await
    }

    /// Makes a storage policy, or changes it for all its disks.
    pub async fn storage_policy_set(
        &self,
        name: &str,
        patch: &QosPatch,
    ) -> Result<StoragePolicy, ClientError> {
        self.send(Method::PUT, &format!("/v1/storage-policies/{}", percent_encode(name)), Some(patch)).await
    }

    /// Removes a storage policy that no disk has.
    pub async fn storage_policy_remove(&self, name: &str) -> Result<StoragePolicy, ClientError> {
        self.delete(&format!("/v1/storage-policies/{}", percent_encode(name))).await
    }

    /// All datastores.
    pub async fn datastores(&self) -> Result<Vec<Datastore>, ClientError> {
        self.get("/v1/datastores").await
    }

    /// Changes how a datastore is throttled, and its capacity.
    pub async fn datastore_set(&self, name: &str, patch: &DatastorePatch) -> Result<Datastore, ClientError> {
        self.send(Method::PATCH, &format!("/v1/datastores/{}", percent_encode(name)), Some(patch)).await
    }
}
