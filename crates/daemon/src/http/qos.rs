//! API handlers for shares, limits and reservations, storage policies, and datastores.

use hob_control::{Datastore, DatastorePatch, DiskQos, QosPatch, StoragePolicy};

use super::endpoints::endpoints;

endpoints! { services;
    /// Returns the entitlements of all disks.
    get "/v1/qos"
    qos_list() -> Vec<DiskQos> {
        Ok(services.qos.disks())
    }

    /// Returns the entitlement of a disk.
    get "/v1/disks/{disk}/qos"
    qos(disk = "disk": "The disk") -> DiskQos, 404 {
        services.qos.disk(&disk)
    }

    /// Changes the entitlement of a disk. Reservations above the capacity of its datastore are
    /// refused.
    patch "/v1/disks/{disk}/qos"
    qos_set(disk = "disk": "The disk"; patch: QosPatch) -> DiskQos, "4XX", "5XX" {
        services.qos.set(disk, patch).await
    }

    /// Returns all storage policies.
    get "/v1/storage-policies"
    storage_policies() -> Vec<StoragePolicy> {
        Ok(services.qos.policies())
    }

    /// Creates a storage policy, or changes it for all disks that have it.
    put "/v1/storage-policies/{policy}"
    storage_policy_set(policy = "policy": "Its name"; patch: QosPatch)
        -> StoragePolicy, "4XX", "5XX" {
        services.qos.policy_set(policy, patch).await
    }

    /// Removes a storage policy that no disk has.
    delete "/v1/storage-policies/{policy}"
    storage_policy_remove(policy = "policy": "Its name") -> StoragePolicy, "4XX", "5XX" {
        services.qos.policy_remove(policy).await
    }

    /// Returns all datastores with their state.
    get "/v1/datastores"
    datastores() -> Vec<Datastore>, "5XX" {
        services.qos.datastores().await
    }

    /// Returns a datastore with its state.
    get "/v1/datastores/{datastore}"
    datastore(datastore = "datastore": "Its name") -> Datastore, 404 {
        services.qos.datastore(&datastore).await
    }

    /// Changes the throttling and the capacity of a datastore.
    patch "/v1/datastores/{datastore}"
    datastore_set(datastore = "datastore": "Its name"; patch: DatastorePatch)
        -> Datastore, "4XX", "5XX" {
        services.qos.datastore_set(datastore, patch).await
    }
}
