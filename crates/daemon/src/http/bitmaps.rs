//! API handlers for dirty bitmaps.

use hob_control::{BitmapAdd, BitmapMerge, BitmapRotate, Bitmaps};

use super::endpoints::endpoints;

endpoints! { services;
    /// Returns all bitmaps of a disk.
    get "/v1/disks/{disk}/bitmaps"
    bitmaps(disk = "disk": "The disk") -> Bitmaps, "4XX", "5XX" {
        services.exports.bitmaps(disk).await
    }

    /// Adds a bitmap to a disk, which records from now on.
    post "/v1/disks/{disk}/bitmaps"
    bitmap_add(disk = "disk": "The disk"; add: BitmapAdd) -> Bitmaps, "4XX", "5XX" {
        services.exports.bitmap_add(disk, add).await
    }

    /// Removes a bitmap of a disk.
    delete "/v1/disks/{disk}/bitmaps/{bitmap}"
    bitmap_remove(disk = "disk": "The disk", bitmap = "bitmap": "Name of the bitmap")
        -> Bitmaps, "4XX", "5XX" {
        services.exports.bitmap_remove(disk, bitmap).await
    }

    /// Clears a bitmap of a disk.
    post "/v1/disks/{disk}/bitmaps/{bitmap}/clear"
    bitmap_clear(disk = "disk": "The disk", bitmap = "bitmap": "Name of the bitmap")
        -> Bitmaps, "4XX", "5XX" {
        services.exports.bitmap_clear(disk, bitmap).await
    }

    /// Freezes the content of a bitmap under another name, and lets the bitmap continue empty. No
    /// change is lost in between.
    post "/v1/disks/{disk}/bitmaps/{bitmap}/rotate"
    bitmap_rotate(
        disk = "disk": "The disk", bitmap = "bitmap": "Name of a bitmap that records";
        rotate: BitmapRotate
    ) -> Bitmaps, "4XX", "5XX" {
        services.exports.bitmap_rotate(disk, bitmap, rotate).await
    }

    /// Merges a bitmap into a recording one and removes it, for example after a failed backup.
    post "/v1/disks/{disk}/bitmaps/{bitmap}/merge"
    bitmap_merge(
        disk = "disk": "The disk", bitmap = "bitmap": "Name of the bitmap"; merge: BitmapMerge
    ) -> Bitmaps, "4XX", "5XX" {
        services.exports.bitmap_merge(disk, bitmap, merge).await
    }
}
