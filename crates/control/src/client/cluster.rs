//! Client methods for cluster membership, migrations, and moves of disks between hosts.

use hyper::Method;

use super::requests::requests;
use super::{Client, ClientError, percent_encode};
use crate::{
    Cluster, ClusterAdvice, ClusterDisk, ClusterHost, ClusterMove, ClusterMoveStart, ClusterTake, Disk,
    DiskChanged, Migration, MigrationStart, TakeBack,
};

requests! {
    /// Returns the cluster membership of the daemon's host.
    cluster() -> Cluster: GET "/v1/cluster";
    /// Returns all members of the daemon's cluster.
    cluster_hosts() -> Vec<ClusterHost>: GET "/v1/cluster/hosts";
    /// Returns all disks of the daemon's cluster.
    cluster_disks() -> Vec<ClusterDisk>: GET "/v1/cluster/disks";
    /// Makes the daemon take ownership of a disk. With `force`, dirty data on a failed host may be
    /// lost.
    cluster_take[disk](force: bool) -> Disk:
        POST "/v1/cluster/disks/{disk}/take", &ClusterTake { force };
    /// Returns moves of disks between the cluster's hosts: those in progress and those that ended
    /// recently.
    cluster_moves() -> Vec<ClusterMove>: GET "/v1/cluster/moves";
    /// Moves a disk from its current owner to another host of the cluster.
    cluster_move[disk](start: &ClusterMoveStart) -> ClusterMove:
        POST "/v1/cluster/disks/{disk}/move", start;
    /// Cancels the move of a disk, if the disk was not handed over yet.
    cluster_move_cancel[disk]() -> ClusterMove: DELETE "/v1/cluster/disks/{disk}/move";
    /// Starts the migration of a disk to another host.
    migrate[disk](start: &MigrationStart) -> Migration: POST "/v1/disks/{disk}/migration", start;
    /// Returns the progress of a disk's migration.
    migration[disk]() -> Migration: GET "/v1/disks/{disk}/migration";
    /// Hands a migrating disk over to the destination now.
    migration_finish[disk]() -> Migration: POST "/v1/disks/{disk}/migration/finish";
    /// Cancels the migration of a disk: the disk stays at the source.
    migration_cancel[disk]() -> Migration: DELETE "/v1/disks/{disk}/migration";
    /// Takes back a disk that was migrated away, without asking the host that owns it.
    migration_take_back[disk](back: TakeBack) -> DiskChanged:
        POST "/v1/disks/{disk}/migration/take-back", &back;
}

impl Client {
    /// Returns placement advice. `leaving` names a host that should have no disks.
    pub async fn cluster_advice(&self, leaving: Option<&str>) -> Result<ClusterAdvice, ClientError> {
        let query = leaving.map(|host| format!("?leaving={}", percent_encode(host))).unwrap_or_default();
        self.send(Method::GET, &format!("/v1/cluster/advice{query}"), None::<&()>).await
    }
}
