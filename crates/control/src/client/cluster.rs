//! Client methods for cluster membership, migrations, and moves of disks between hosts.

use hyper::Method;

use super::{Client, ClientError, disk_path, percent_encode};
use crate::{
    Cluster, ClusterAdvice, ClusterDisk, ClusterHost, ClusterMove, ClusterMoveStart, ClusterTake, Disk,
    DiskChanged, Migration, MigrationStart, TakeBack,
};

impl Client {
    /// Returns the cluster membership of the daemon's host.
    pub async fn cluster(&self) -> Result<Cluster, ClientError> {
        self.get("/v1/cluster").await
    }

    /// Returns all members of the daemon's cluster.
    pub async fn cluster_hosts(&self) -> Result<Vec<ClusterHost>, ClientError> {
        self.get("/v1/cluster/hosts").await
    }

    /// Returns all disks of the daemon's cluster.
    pub async fn cluster_disks(&self) -> Result<Vec<ClusterDisk>, ClientError> {
        self.get("/v1/cluster/disks").await
    }

    /// Makes the daemon take ownership of a disk. With `force`, dirty data on a failed host may be
    /// lost.
    pub async fn cluster_take(&self, disk: &str, force: bool) -> Result<Disk, ClientError> {
        let path = format!("/v1/cluster/disks/{}/take", percent_encode(disk));
        self.send(Method::POST, &path, Some(&ClusterTake { force })).await
    }

    /// Returns moves of disks between the cluster's hosts: those in progress and those that ended
    /// recently.
    pub async fn cluster_moves(&self) -> Result<Vec<ClusterMove>, ClientError> {
        self.get("/v1/cluster/moves").await
    }

    /// Moves a disk from its current owner to another host of the cluster.
    pub async fn cluster_move(
        &self,
        disk: &str,
        start: &ClusterMoveStart,
    ) -> Result<ClusterMove, ClientError> {
        let path = format!("/v1/cluster/disks/{}/move", percent_encode(disk));
        self.send(Method::POST, &path, Some(start)).await
    }

    /// Cancels the move of a disk, if the disk was not handed over yet.
    pub async fn cluster_move_cancel(&self, disk: &str) -> Result<ClusterMove, ClientError> {
        let path = format!("/v1/cluster/disks/{}/move", percent_encode(disk));
        self.send(Method::DELETE, &path, None::<&()>).await
    }

    /// Returns placement advice. `leaving` names a host that should have no disks.
    pub async fn cluster_advice(&self, leaving: Option<&str>) -> Result<ClusterAdvice, ClientError> {
        let query = leaving.map(|host| format!("?leaving={}", percent_encode(host))).unwrap_or_default();
        self.get(&format!("/v1/cluster/advice{query}")).await
    }

    /// Starts the migration of a disk to another host.
    pub async fn migrate(&self, disk: &str, start: &MigrationStart) -> Result<Migration, ClientError> {
        self.send(Method::POST, &format!("{}/migration", disk_path(disk)), Some(start)).await
    }

    /// Returns the progress of a disk's migration.
    pub async fn migration(&self, disk: &str) -> Result<Migration, ClientError> {
        self.get(&format!("{}/migration", disk_path(disk))).await
    }

    /// Hands a migrating disk over to the destination now.
    pub async fn migration_finish(&self, disk: &str) -> Result<Migration, ClientError> {
        self.send(Method::POST, &format!("{}/migration/finish", disk_path(disk)), None::<&()>).await
    }

    /// Cancels the migration of a disk: the disk stays at the source.
    pub async fn migration_cancel(&self, disk: &str) -> Result<Migration, ClientError> {
        self.delete(&format!("{}/migration", disk_path(disk))).await
    }

    /// Takes back a disk that was migrated away, without asking the host that owns it.
    pub async fn migration_take_back(&self, disk: &str, back: TakeBack) -> Result<DiskChanged, ClientError> {
        self.send(Method::POST, &format!("{}/migration/take-back", disk_path(disk)), Some(&back)).await
    }
}
