//! Client methods for one disk: settings, exports, dirty bitmaps, cache and statistics.

use hyper::Method;

use super::{Client, ClientError, disk_path, percent_encode};
use crate::{
    BitmapAdd, BitmapMerge, BitmapRotate, Bitmaps, CacheEnable, CachePatch, Disk, DiskAdd, DiskChanged,
    DiskCurve, DiskHistograms, DiskPatch, DiskResize, DiskStats, EventReport, Explanation, Export,
    ExportDirty, LifeEvent, OnClients, OnDirty, PlannedChange, Preview,
};

impl Client {
    /// Returns all disks.
    pub async fn disks(&self) -> Result<Vec<Disk>, ClientError> {
        self.get("/v1/disks").await
    }

    /// Returns one disk.
    pub async fn disk(&self, disk: &str) -> Result<Disk, ClientError> {
        self.get(&disk_path(disk)).await
    }

    /// Adds a disk to the daemon, which then serves it.
    pub async fn disk_add(&self, add: &DiskAdd) -> Result<DiskChanged, ClientError> {
        self.send(Method::POST, "/v1/disks", Some(add)).await
    }

    /// Removes a disk, after a drain or by discarding its dirty data. The backing keeps its data.
    pub async fn disk_remove(
        &self,
        disk: &str,
        dirty: OnDirty,
        clients: OnClients,
    ) -> Result<DiskChanged, ClientError> {
        let force = match (dirty, clients) {
            (_, OnClients::Refuse) => "",
            (OnDirty::Drain, OnClients::Disconnect) => "?force=true",
            (OnDirty::Discard, OnClients::Disconnect) => "&force=true",
        };
        self.delete(&format!("{}{}{force}", disk_path(disk), dirty.query())).await
    }

    /// Returns the effects of a change of a disk without making the change.
    pub async fn preview(&self, disk: &str, change: &PlannedChange) -> Result<Preview, ClientError> {
        self.send(Method::POST, &format!("{}/preview", disk_path(disk)), Some(change)).await
    }

    /// Grows a disk.
    pub async fn disk_resize(&self, disk: &str, resize: &DiskResize) -> Result<DiskChanged, ClientError> {
        self.send(Method::POST, &format!("{}/resize", disk_path(disk)), Some(resize)).await
    }

    /// Changes a disk's own settings.
    pub async fn disk_patch(&self, disk: &str, patch: &DiskPatch) -> Result<DiskChanged, ClientError> {
        self.send(Method::PATCH, &disk_path(disk), Some(patch)).await
    }

    /// Reports an event of the VM that uses a disk.
    pub async fn disk_event(
        &self,
        disk: &str,
        event: LifeEvent,
        dirty: OnDirty,
    ) -> Result<DiskChanged, ClientError> {
        let report = EventReport { event, discard_dirty: dirty == OnDirty::Discard };
        self.send(Method::POST, &format!("{}/events", disk_path(disk)), Some(&report)).await
    }

    /// Adds an export to a disk.
    pub async fn export_add(&self, disk: &str, export: &Export) -> Result<DiskChanged, ClientError> {
        self.send(Method::POST, &format!("{}/exports", disk_path(disk)), Some(export)).await
    }

    /// Removes an additional export of a disk.
    pub async fn export_remove(&self, disk: &str, export: &str) -> Result<DiskChanged, ClientError> {
        self.delete(&format!("{}/exports/{}", disk_path(disk), percent_encode(export))).await
    }

    /// Returns the dirty bitmaps of a disk.
    pub async fn bitmaps(&self, disk: &str) -> Result<Bitmaps, ClientError> {
        self.get(&format!("{}/bitmaps", disk_path(disk))).await
    }

    /// Adds a dirty bitmap to a disk.
    pub async fn bitmap_add(&self, disk: &str, add: &BitmapAdd) -> Result<Bitmaps, ClientError> {
        self.send(Method::POST, &format!("{}/bitmaps", disk_path(disk)), Some(add)).await
    }

    /// Removes a dirty bitmap of a disk.
    pub async fn bitmap_remove(&self, disk: &str, bitmap: &str) -> Result<Bitmaps, ClientError> {
        self.delete(&bitmap_path(disk, bitmap)).await
    }

    /// Empties a dirty bitmap.
    pub async fn bitmap_clear(&self, disk: &str, bitmap: &str) -> Result<Bitmaps, ClientError> {
        self.send(Method::POST, &format!("{}/clear", bitmap_path(disk, bitmap)), None::<&()>).await
    }

    /// Moves the changes that a bitmap recorded to a new frozen bitmap, and continues with an empty
    /// bitmap.
    pub async fn bitmap_rotate(
        &self,
        disk: &str,
        bitmap: &str,
        rotate: &BitmapRotate,
    ) -> Result<Bitmaps, ClientError> {
        self.send(Method::POST, &format!("{}/rotate", bitmap_path(disk, bitmap)), Some(rotate)).await
    }

    /// Adds the changes of one dirty bitmap to another one, and removes the first.
    pub async fn bitmap_merge(
        &self,
        disk: &str,
        bitmap: &str,
        merge: &BitmapMerge,
    ) -> Result<Bitmaps, ClientError> {
        self.send(Method::POST, &format!("{}/merge", bitmap_path(disk, bitmap)), Some(merge)).await
    }

    /// Gives a disk a cache.
    pub async fn cache_enable(&self, disk: &str, enable: &CacheEnable) -> Result<DiskChanged, ClientError> {
        self.send(Method::PUT, &format!("{}/cache", disk_path(disk)), Some(enable)).await
    }

    /// Changes settings of a disk's cache.
    pub async fn cache_patch(&self, disk: &str, patch: &CachePatch) -> Result<DiskChanged, ClientError> {
        self.send(Method::PATCH, &format!("{}/cache", disk_path(disk)), Some(patch)).await
    }

    /// Removes a disk's cache, after a drain or by discarding its dirty data.
    pub async fn cache_disable(&self, disk: &str, dirty: OnDirty) -> Result<DiskChanged, ClientError> {
        self.delete(&format!("{}/cache{}", disk_path(disk), dirty.query())).await
    }

    /// Starts or continues writing a cache's dirty data to the backing.
    pub async fn drain(&self, disk: &str) -> Result<DiskChanged, ClientError> {
        self.send(Method::POST, &format!("{}/drain", disk_path(disk)), None::<&()>).await
    }

    /// Stops a drain before the cache is clean.
    pub async fn drain_stop(&self, disk: &str) -> Result<DiskChanged, ClientError> {
        self.delete(&format!("{}/drain", disk_path(disk))).await
    }

    /// Discards a cache's dirty data: acknowledged writes are lost.
    pub async fn discard_dirty(&self, disk: &str) -> Result<DiskChanged, ClientError> {
        let path = format!("{}/cache/discard-dirty{}", disk_path(disk), OnDirty::Discard.query());
        self.send(Method::POST, &path, None::<&()>).await
    }

    /// Makes the daemon write a cache's dirty data to a file on the daemon's host.
    pub async fn export_dirty(&self, disk: &str, export: &ExportDirty) -> Result<DiskChanged, ClientError> {
        self.send(Method::POST, &format!("{}/cache/export-dirty", disk_path(disk)), Some(export)).await
    }

    /// Empties a cache.
    pub async fn cache_clear(&self, disk: &str) -> Result<DiskChanged, ClientError> {
        self.send(Method::POST, &format!("{}/cache/clear", disk_path(disk)), None::<&()>).await
    }

    /// Returns the counters of a disk.
    pub async fn stats(&self, disk: &str) -> Result<DiskStats, ClientError> {
        self.get(&format!("{}/stats", disk_path(disk))).await
    }

    /// Returns the histograms of a disk's requests.
    pub async fn histograms(&self, disk: &str) -> Result<DiskHistograms, ClientError> {
        self.get(&format!("{}/histograms", disk_path(disk))).await
    }

    /// Resets the histograms of a disk's requests.
    pub async fn histograms_reset(&self, disk: &str) -> Result<DiskHistograms, ClientError> {
        self.delete(&format!("{}/histograms", disk_path(disk))).await
    }

    /// Returns the hit ratios that a disk would have with caches of other sizes.
    pub async fn curve(&self, disk: &str) -> Result<DiskCurve, ClientError> {
        self.get(&format!("{}/curve", disk_path(disk))).await
    }

    /// Resets a disk's miss-ratio curve. The daemon starts to learn the curve again.
    pub async fn curve_reset(&self, disk: &str) -> Result<DiskCurve, ClientError> {
        self.delete(&format!("{}/curve", disk_path(disk))).await
    }

    /// Explains why a disk's I/O is, or is not, served from flash.
    pub async fn explain(&self, disk: &str) -> Result<Explanation, ClientError> {
        self.get(&format!("{}/explain", disk_path(disk))).await
    }
}

fn bitmap_path(disk: &str, bitmap: &str) -> String {
    format!("{}/bitmaps/{}", disk_path(disk), percent_encode(bitmap))
}
