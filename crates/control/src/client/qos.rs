//! Client methods for shares, limits and reservations of disks, and for datastores.

use super::requests::requests;
use crate::{Datastore, DatastorePatch, DiskQos, QosPatch, StoragePolicy};

requests! {
    /// Returns the shares, reservations and limits of all disks.
    qos_list() -> Vec<DiskQos>: GET "/v1/qos";
    /// Returns the shares, reservation and limits of a disk.
    qos[disk]() -> DiskQos: GET "/v1/disks/{disk}/qos";
    /// Changes the shares, reservation or limits of a disk.
    qos_set[disk](patch: &QosPatch) -> DiskQos: PATCH "/v1/disks/{disk}/qos", patch;
    /// Returns all storage policies.
    storage_policies() -> Vec<StoragePolicy>: GET "/v1/storage-policies";
    /// Creates a storage policy, or changes it for all disks that have it.
    storage_policy_set[name](patch: &QosPatch) -> StoragePolicy: PUT "/v1/storage-policies/{name}", patch;
    /// Removes a storage policy that no disk has.
    storage_policy_remove[name]() -> StoragePolicy: DELETE "/v1/storage-policies/{name}";
    /// Returns all datastores.
    datastores() -> Vec<Datastore>: GET "/v1/datastores";
    /// Changes the throttling and the capacity of a datastore.
    datastore_set[name](patch: &DatastorePatch) -> Datastore: PATCH "/v1/datastores/{name}", patch;
}
