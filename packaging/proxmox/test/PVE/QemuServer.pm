package PVE::QemuServer;
# A stub: the real module registers the format of VM configurations.
use strict;
use warnings;

1;
