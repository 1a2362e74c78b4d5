package PVE::Storage;
# A stub: the parts of Proxmox VE's storage layer that the plugin uses.
use strict;
use warnings;

our $config = {
    ids => {
        local => { type => 'stub', path => '/srv' },
        cached => { type => 'hob', 'hob-base' => 'local', 'hob-pool' => 'flash', 'hob-percent' => 20 },
        thin => { type => 'stub' },
        zfs => { type => 'stub', formats => ['zfs'] },
        over_zfs => { type => 'hob', 'hob-base' => 'zfs', 'hob-pool' => 'flash' },
        over_thin => { type => 'hob', 'hob-base' => 'thin', 'hob-pool' => 'flash' },
        nas => { type => 'nfs' },
        remote => { type => 'hob', 'hob-base' => 'nas', 'hob-pool' => 'flash' },
        nested => { type => 'hob', 'hob-base' => 'cached', 'hob-pool' => 'flash' },
    },
};

sub APIVER { return 12; }

sub config { return $config; }

sub activate_storage {
    my ($cfg, $storeid) = @_;
    push @PVE::Storage::Plugin::calls, "PVE::Storage::activate_storage $storeid";
}

sub storage_config {
    my ($cfg, $storeid) = @_;
    return $cfg->{ids}->{$storeid} // die "no such storage '$storeid'\n";
}

1;
