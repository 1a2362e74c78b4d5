//! Client methods for shares, limits and reservations of disks, and for datastores.

use hyper::Method;

use super::{Client, ClientError, disk_path, percent_encode};
use crate::{Datastore, DatastorePatch, DiskQos, QosPatch, StoragePolicy};

impl Client {
    /// Returns the entitlements of all disks.
    pub async fn qos_list(&self) -> Result<Vec<DiskQos>, ClientError> {
        self.get("/v1/qos").await
    }

    /// Returns the entitlement of a disk.
    pub async fn qos(&self, disk: &str) -> Result<DiskQos, ClientError> {
        self.get(&format!("{}/qos", disk_path(disk))).await
    }

    /// Changes the entitlement of a disk.
    pub async fn qos_set(&self, disk: &str, patch: &QosPatch) -> Result<DiskQos, ClientError> {
        self.send(Method::PATCH, &format!("{}/qos", disk_path(disk)), Some(patch)).await
    }

    /// Returns all storage policies.
    pub async fn storage_policies(&self) -> Result<Vec<StoragePolicy>, ClientError> {
        self.get("/v1/storage-policies").await
    }

    /// Creates a storage policy, or changes it for all disks that have it.
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

    /// Returns all datastores.
    pub async fn datastores(&self) -> Result<Vec<Datastore>, ClientError> {
        self.get("/v1/datastores").await
    }

    /// Changes the throttling and the capacity of a datastore.
    pub async fn datastore_set(&self, name: &str, patch: &DatastorePatch) -> Result<Datastore, ClientError> {
        self.send(Method::PATCH, &format!("/v1/datastores/{}", percent_encode(name)), Some(patch)).await
    }
}
