//! API handlers for additional exports of disks.

use hob_control::{DiskChanged, Export};

use super::endpoints::endpoints;

endpoints! { services;
    /// Adds an export to a disk.
    post "/v1/disks/{disk}/exports"
    export_add(disk = "disk": "The disk"; export: Export) -> DiskChanged, "4XX", "5XX" {
        services.disks.export_add(disk, export).await
    }

    /// Removes an additional export. The export's clients are disconnected.
    delete "/v1/disks/{disk}/exports/{export}"
    export_remove(disk = "disk": "The disk", export = "export": "Name of the export")
        -> DiskChanged, "4XX", "5XX" {
        services.disks.export_remove(disk, export).await
    }
}
