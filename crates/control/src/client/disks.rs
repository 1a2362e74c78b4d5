//! Client methods for one disk: settings, exports, dirty bitmaps, cache and statistics.

use hyper::Method;

use super::requests::requests;
use super::{Client, ClientError, disk_path};
use crate::{
    AdoptCache, BitmapAdd, BitmapMerge, BitmapRotate, Bitmaps, CacheEnable, CachePatch, Disk, DiskAdd,
    DiskChanged, DiskCurve, DiskHistograms, DiskPatch, DiskResize, DiskStats, DrainFor, EventReport,
    Explanation, Export, ExportDirty, LifeEvent, OnClients, OnDirty, PlannedChange, Preview,
};

requests! {
    /// Returns all disks.
    disks() -> Vec<Disk>: GET "/v1/disks";
    /// Returns one disk.
    disk[disk]() -> Disk: GET "/v1/disks/{disk}";
    /// Adds a disk to the daemon, which then serves it.
    disk_add(add: &DiskAdd) -> DiskChanged: POST "/v1/disks", add;
    /// Returns the effects of a change of a disk without making the change.
    preview[disk](change: &PlannedChange) -> Preview: POST "/v1/disks/{disk}/preview", change;
    /// Grows a disk.
    disk_resize[disk](resize: &DiskResize) -> DiskChanged: POST "/v1/disks/{disk}/resize", resize;
    /// Changes a disk's own settings.
    disk_patch[disk](patch: &DiskPatch) -> DiskChanged: PATCH "/v1/disks/{disk}", patch;
    /// Reports an event of the VM that uses a disk.
    disk_event[disk](event: LifeEvent, dirty: OnDirty) -> DiskChanged:
        POST "/v1/disks/{disk}/events", &EventReport { event, discard_dirty: dirty == OnDirty::Discard };
    /// Adds an export to a disk.
    export_add[disk](export: &Export) -> DiskChanged: POST "/v1/disks/{disk}/exports", export;
    /// Removes an additional export of a disk.
    export_remove[disk, export]() -> DiskChanged: DELETE "/v1/disks/{disk}/exports/{export}";
    /// Returns the dirty bitmaps of a disk.
    bitmaps[disk]() -> Bitmaps: GET "/v1/disks/{disk}/bitmaps";
    /// Adds a dirty bitmap to a disk.
    bitmap_add[disk](add: &BitmapAdd) -> Bitmaps: POST "/v1/disks/{disk}/bitmaps", add;
    /// Removes a dirty bitmap of a disk.
    bitmap_remove[disk, bitmap]() -> Bitmaps: DELETE "/v1/disks/{disk}/bitmaps/{bitmap}";
    /// Empties a dirty bitmap.
    bitmap_clear[disk, bitmap]() -> Bitmaps: POST "/v1/disks/{disk}/bitmaps/{bitmap}/clear";
    /// Moves the changes that a bitmap recorded to a new frozen bitmap, and continues with an empty
    /// bitmap.
    bitmap_rotate[disk, bitmap](rotate: &BitmapRotate) -> Bitmaps:
        POST "/v1/disks/{disk}/bitmaps/{bitmap}/rotate", rotate;
    /// Adds the changes of one dirty bitmap to another one, and removes the first.
    bitmap_merge[disk, bitmap](merge: &BitmapMerge) -> Bitmaps:
        POST "/v1/disks/{disk}/bitmaps/{bitmap}/merge", merge;
    /// Gives a disk a cache.
    cache_enable[disk](enable: &CacheEnable) -> DiskChanged: PUT "/v1/disks/{disk}/cache", enable;
    /// Changes settings of a disk's cache.
    cache_patch[disk](patch: &CachePatch) -> DiskChanged: PATCH "/v1/disks/{disk}/cache", patch;
    /// Removes a disk's cache, after a drain or by discarding its dirty data.
    cache_disable[disk](dirty: OnDirty) -> DiskChanged: DELETE "/v1/disks/{disk}/cache{}" (dirty.query());
    /// Starts or continues writing a cache's dirty data to the backing.
    drain[disk](operation: DrainFor) -> DiskChanged:
        POST "/v1/disks/{disk}/drain?operation={}" (operation.name());
    /// Stops a drain before the cache is clean.
    drain_stop[disk]() -> DiskChanged: DELETE "/v1/disks/{disk}/drain";
    /// Discards a cache's dirty data: acknowledged writes are lost.
    discard_dirty[disk]() -> DiskChanged:
        POST "/v1/disks/{disk}/cache/discard-dirty{}" (OnDirty::Discard.query());
    /// Makes the daemon write a cache's dirty data to a file on the daemon's host.
    export_dirty[disk](export: &ExportDirty) -> DiskChanged:
        POST "/v1/disks/{disk}/cache/export-dirty", export;
    /// Gives an offline disk a cache that belongs to no disk, with its dirty data.
    cache_adopt[disk](adopt: &AdoptCache) -> DiskChanged: POST "/v1/disks/{disk}/cache/adopt", adopt;
    /// Empties a cache.
    cache_clear[disk]() -> DiskChanged: POST "/v1/disks/{disk}/cache/clear";
    /// Returns the counters of a disk.
    stats[disk]() -> DiskStats: GET "/v1/disks/{disk}/stats";
    /// Returns the histograms of a disk's requests.
    histograms[disk]() -> DiskHistograms: GET "/v1/disks/{disk}/histograms";
    /// Resets the histograms of a disk's requests.
    histograms_reset[disk]() -> DiskHistograms: DELETE "/v1/disks/{disk}/histograms";
    /// Returns the hit ratios that a disk would have with caches of other sizes.
    curve[disk]() -> DiskCurve: GET "/v1/disks/{disk}/curve";
    /// Resets a disk's miss-ratio curve. The daemon starts to learn the curve again.
    curve_reset[disk]() -> DiskCurve: DELETE "/v1/disks/{disk}/curve";
    /// Explains why a disk's I/O is, or is not, served from flash.
    explain[disk]() -> Explanation: GET "/v1/disks/{disk}/explain";
}

impl Client {
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
        let path = format!("{}{}{force}", disk_path(disk), dirty.query());
        self.send(Method::DELETE, &path, None::<&()>).await
    }
}
