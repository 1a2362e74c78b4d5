//! Questions and instructions to a daemon as a member of its cluster, and those that move disks between hosts.

use hyper::Method;

use super::{Client, ClientError, disk_path, percent_encode};
use crate::{
    Cluster, ClusterAdvice, ClusterDisk, ClusterHost, ClusterMove, ClusterMoveStart, ClusterTake, Disk,
    DiskChanged, Migration, MigrationStart, TakeBack,
};

impl Client {
    /// The daemon's host, as a member of its cluster.
    pub async fn cluster(&self) -> Result<Cluster, ClientError> {
        self.get("/v1/cluster").await
    }

    /// All members of its cluster.
    pub async fn cluster_hosts(&self) -> Result<Vec<ClusterHost>, ClientError> {
        self.get("/v1/cluster/hosts").await
    }

    /// All disks of its cluster.
    pub async fn cluster_disks(&self) -> Result<Vec<ClusterDisk>, ClientError> {
        self.get("/v1/cluster/disks").await
    }

    /// Has the daemon take a disk. `force`: even if data of a host that is gone is lost.
    pub async fn cluster_take(&self, disk: &str, force: bool) -> Result<Disk, ClientError> {
        let path = format!("/v1/cluster/disks/{}/take", percent_encode(disk));
        self.send(Method::POST, &path, Some(&ClusterTake { force })).await
    }

    /// Moves of disks between the cluster's hosts that are under way, or were not long ago.
    pub async fn cluster_moves(&self) -> Result<Vec<ClusterMove>, ClientError> {
        self.get("/v1/cluster/moves").await
    }

    /// Moves a disk to another host of the cluster from its current owner.
    pub async fn cluster_move(
        &self,
        disk: &str,
        start: &ClusterMoveStart,
    ) -> Result<ClusterMove, ClientError> {
        let path = format!("/v1/cluster/disks/{}/move", percent_encode(disk));
        self.send(Method::POST, &path, Some(start)).await
    }

    /// Calls a disk's move off, if it is not too late.
    pub async fn cluster_move_cancel(&self, disk: &str) -> Result<ClusterMove, ClientError> {
        let path = format!("/v1/cluster/disks/{}/move", percent_encode(disk));
        self.send(Method::DELETE, &path, None::<&()>).await
    }

    /// Placement advice. `leaving` names a host that is to keep no disks.
    pub async fn cluster_advice(&self, leaving: Option<&str>) -> Result<ClusterAdvice, ClientError> {
        let query = leaving.map(|host| format!("?leaving={}", percent_encode(host))).unwrap_or_default();
        self.get(&format!("/v1/cluster/advice{query}")).await
    }

    /// Begins to move a disk to another host.
    pub async fn migrate(&self, disk: &str, start: &MigrationStart) -> Result<Migration, ClientError> {
        self.send(Method::POST, &format!("{}/migration", disk_path(disk)), Some(start)).await
    }

    /// How far that is.
    pub async fn migration(&self, disk: &str) -> Result<Migration, ClientError> {
        self.get(&format!("{}/migration", disk_path(disk))).await
    }

    /// Hands the disk over now.
    pub async fn migration_finish(&self, disk: &str) -> Result<Migration, ClientError> {
        self.send(Method::POST, &format!("{}/migration/finish", disk_path(disk)), None::<&()>).await
    }

    /// Keeps the disk.
    pub async fn migration_cancel(&self, disk: &str) -> Result<Migration, ClientError> {
        self.delete(&format!("{}/migration", disk_path(disk))).await
    }

    /// Takes a disk back that is away, without the host that has it.
    pub async fn migration_take_back(&self, disk: &str, back: TakeBack) -> Result<DiskChanged, ClientError> {
        self.send(Method::POST, &format!("{}/migration/take-back", disk_path(disk)), Some(&back)).await
    }
}
