#!/usr/bin/perl
# Tests of HobPlugin.pm against stubs of Proxmox VE's modules: perl -T -I packaging/proxmox/test packaging/proxmox/test/plugin.t
use strict;
use warnings;

use FindBin;
use Test::More;

use PVE::Tools;

my ($directory) = $FindBin::Bin =~ m/^(.+)$/;
require "$directory/../HobPlugin.pm";

is(${^TAINT}, 1, 'perl -T checks the arguments of commands, as in pvedaemon');

my $plugin = 'PVE::Storage::Custom::HobPlugin';
my $scfg = $PVE::Storage::config->{ids}->{cached};
my $volume = 'vm-100-disk-0';

# Returns the commands and calls since the last time, except commands that list hob's disks.
sub noted {
    my @commands = grep { !m/^hob disk list/ } @PVE::Tools::commands;
    my @calls = @PVE::Storage::Plugin::calls;
    @PVE::Tools::commands = ();
    @PVE::Storage::Plugin::calls = ();
    return [@commands, @calls];
}

sub serve {
    my ($mode) = @_;
    $PVE::Tools::disks =
        $mode ? qq([{"name":"cached-$volume","backing":"/srv/$volume","cache":{"mode":"$mode"}}]) : '[]';
}

is($plugin->api(), 12, 'an older Proxmox VE is offered its own version');
is_deeply([$plugin->parse_volname($volume)], ['images', $volume, 100, undef, undef, 0, 'raw'], 'a volume of LVM');
is_deeply([($plugin->parse_volname('100/vm-100-disk-1.raw'))[1, 2]], ['vm-100-disk-1', 100], 'a volume of a directory');
ok(!eval { $plugin->parse_volname($_); 1 }, "'$_' is refused") for '100/vm-100-disk-1.qcow2', 'base-100-disk-0', 'x';

serve('');
my $export = "nbd+unix:///cached-$volume?socket=/run/hob/nbd.sock";
is(scalar($plugin->path($scfg, $volume, 'cached')), $export, 'an inactive volume has the path that it will have as active');
is(scalar($plugin->path($scfg, $volume, 'cached', 'snap')), "/srv/$volume", 'a snapshot has the path on the base storage');
is(scalar($plugin->path($scfg, 'vm-100-lost', 'cached')), $export =~ s/disk-0/lost/r, 'so has a volume of unknown size');
$plugin->activate_volume('cached', $scfg, $volume, undef, undef, 'hints');
is_deeply(
    noted(),
    [
        "hob disk add cached-$volume --backing /srv/$volume --format raw",
        "hob cache enable cached-$volume --pool flash --size " . int((1 << 30) / 5),
        "activate_volume local - $volume - - hints",
    ],
    'an activated volume is served with a cache'
);
$PVE::Tools::fail = 'cache enable';
{
    my $warned = '';
    local $SIG{__WARN__} = sub { $warned .= $_[0]; };
    ok($plugin->activate_volume('cached', $scfg, $volume, undef, undef), 'a VM starts without a cache if there is no room');
    like($warned, qr/has no cache/, 'and a warning says so');
}
$PVE::Tools::fail = '';
noted();

serve('write-back');
$plugin->activate_volume('cached', $scfg, $volume, undef, undef);
is_deeply(noted(), ["activate_volume local - $volume - - -"], 'an active volume is left alone');
is(scalar($plugin->path($scfg, $volume, 'cached')), $export, 'an active volume is an export of hob');
{
    # Two functions of qemu-server that compare the paths of volumes.
    package PVE::QemuServer::Drive;
    sub scan_volids { return $plugin->path($scfg, $volume, 'cached'); }
    sub is_volume_in_use { my $scan = sub { return scalar($plugin->path($scfg, $volume, 'cached')) }; return $scan->(); }
}
is((PVE::QemuServer::Drive::scan_volids())[0], "/srv/$volume", 'a rescan finds that the base volume is in use');
is(PVE::QemuServer::Drive::is_volume_in_use(), "/srv/$volume", 'and so does the deletion of an unused disk');
ok(!eval { $plugin->map_volume('cached', $scfg, $volume); 1 }, "a volume of hob is no file: $@");
my $options = $plugin->qemu_blockdev_options($scfg, 'cached', $volume, undef, {});
is($options->{driver}, 'nbd', 'QEMU uses NBD');
is($options->{export}, "cached-$volume", 'and the export of the volume');
is($options->{'reconnect-delay'}, 300, 'and waits for hob to restart');
noted();

serve('');
for my $unserved ('vm-100-small', 'vm-100-cloudinit', '100/vm-100-cloudinit.raw', '100/vm-100-state-snap.raw') {
    $plugin->activate_volume('cached', $scfg, $unserved, undef, undef, { hint => 1 });
    is(scalar($plugin->path($scfg, $unserved, 'cached')), "/srv/$unserved", "$unserved has the path of the base volume");
    $plugin->map_volume('cached', $scfg, $unserved, undef);
    $plugin->qemu_blockdev_options($scfg, 'cached', $unserved, '10.0', {});
    is_deeply(
        noted(),
        [
            "activate_volume local - $unserved - - -",
            "map_volume local - $unserved - -",
            "qemu_blockdev_options - local $unserved 10.0 -",
        ],
        'and hob does not serve it'
    );
}
for my $attached ('vm-100-small', 'vm-100-cloudinit') {
    $PVE::Tools::disks = qq([{"name":"cached-$attached","backing":"/srv/$attached","cache":null}]);
    like(scalar($plugin->path($scfg, $attached, 'cached')), qr/^nbd/, "unless 'hob attach' attached it");
}
serve('write-back');
noted();

$plugin->volume_snapshot($scfg, 'cached', $volume, 'snap');
is_deeply(
    noted(),
    [
        "hob cache set cached-$volume --mode write-through",
        "hob cache set cached-$volume --mode write-back",
        "volume_snapshot - local $volume snap",
    ],
    'a snapshot has every acknowledged write'
);
serve('write-through');
$plugin->volume_snapshot($scfg, 'cached', $volume, 'snap');
is_deeply(noted(), ["volume_snapshot - local $volume snap"], 'under write-through nothing is switched');

$plugin->volume_snapshot_rollback($scfg, 'cached', $volume, 'snap');
is(noted()->[0], "hob disk remove cached-$volume", 'a rollback drops what was cached');
ok(!eval { $plugin->volume_resize($scfg, 'cached', $volume, 1, 1); 1 }, 'a running volume is not resized');
noted();

$plugin->deactivate_volume('cached', $scfg, $volume, undef, undef);
is_deeply(
    noted(),
    ["hob disk remove cached-$volume", "deactivate_volume local - $volume - -"],
    'a volume is drained before it is deactivated'
);
$PVE::Tools::fail = 'disk remove';
ok(!eval { $plugin->deactivate_volume('cached', $scfg, $volume, undef, undef); 1 }, 'a drain that fails is an error');
is_deeply(noted(), ["hob disk remove cached-$volume"], 'and the base volume stays active');
$PVE::Tools::fail = '';

serve('write-back');
$PVE::Tools::disks =~ s!/srv/!/other/!;
ok(!eval { $plugin->activate_volume('cached', $scfg, $volume, undef, undef); 1 }, "another volume's disk is refused: $@");
like($@, qr!belongs to /other/$volume, not to /srv/$volume!, 'with both volumes');
ok(!eval { $plugin->deactivate_volume('cached', $scfg, $volume, undef, undef); 1 }, 'and is not removed');
is_deeply([grep { m/^hob/ } @{ noted() }], [], 'no command changes it');
serve('');
sub name_of {
    my ($volname) = @_;
    $plugin->activate_volume('cached', $scfg, $volname, undef, undef);
    return (map { m/^hob disk add (\S+)/ ? $1 : () } @{ noted() })[0];
}
my %names = (
    'vm-100-a-b' => 'cached-vm-100-a-b',
    'vm-100-a+b' => 'cached-vm-100-a.x2b.b',
    'vm-100-a.x2b.b' => 'cached-vm-100-a.x2e.x2b.b',
    '100/vm-100-disk-1.raw' => 'cached-100-vm-100-disk-1.raw',
);
is(name_of($_), $names{$_}, "the disk of $_") for sort keys %names;

serve('write-back');
is($plugin->volume_has_feature($scfg, 'rename', 'cached', $volume), 'local:made', 'the base storage says what it can do');
is($plugin->rename_volume($scfg, 'cached', $volume, 101), 'cached:made', 'a renamed volume is on this storage');
is(noted()->[0], "hob disk remove cached-$volume", 'and hob serves it no longer by the old name');
serve('');

$plugin->activate_storage('cached', $scfg, {});
is_deeply(noted(), ['hob pool show flash', 'PVE::Storage::activate_storage local'], 'the base storage is activated');
is($plugin->alloc_image('cached', $scfg, 100, 'raw', undef, 1), 'made', 'the base storage allocates');
my $over_thin = $PVE::Storage::config->{ids}->{over_thin};
my $state = 'vm-100-state-a';
is($plugin->alloc_image('cached', $scfg, 100, 'raw', $state, 1), "$state.raw", 'a named file gets an extension');
is($plugin->alloc_image('over_thin', $over_thin, 100, 'raw', $state, 1), $state, 'a named device does not');
for my $name ($volume, "100/$volume.raw") {
    is($plugin->volume_import($scfg, 'cached', undef, $name, 'raw+size'), 'cached:made', "$name is imported");
    is(noted()->[-1], "volume_import - local - 100/$volume.raw raw+size", 'as a file');
    is_deeply([$plugin->volume_import_formats($over_thin, 'over_thin', $name)], ['raw+size'], 'or as a device');
    is_deeply(noted(), ["volume_import_formats $volume"], 'with the name of a device');
}

# ZFS exports only snapshots.
my $over_zfs = $PVE::Storage::config->{ids}->{over_zfs};
my @exports = ([undef, undef, 0], ['snap', undef, 0], [undef, undef, 1]);
my @formats = map { [$plugin->volume_export_formats($over_zfs, 'over_zfs', $volume, @$_)] } @exports;
is_deeply(\@formats, [['raw+size'], ['zfs'], []], 'the plugin exports what ZFS does not');
my @imports = map { [$plugin->volume_import_formats($over_zfs, 'over_zfs', $volume, undef, undef, $_)] } (0, 1);
is_deeply(\@imports, [['zfs', 'raw+size'], ['zfs']], 'and imports it');
noted();
open(my $stream, '+<', '/dev/null') or die "cannot open: $!\n";
$plugin->volume_export($over_zfs, 'over_zfs', $stream, $volume, 'raw+size', undef, undef, 0);
is_deeply(
    noted(),
    ["dd if=/dev/thin/$volume bs=1M status=none", 'write_common_header ' . (1 << 30)],
    'an exported volume has its size and its data'
);
ok(
    !eval { $plugin->volume_import($over_zfs, 'over_zfs', $stream, $volume, 'raw+size', undef, undef, 0, 0); 1 },
    "an existing volume is not overwritten: $@"
);
noted();
is(
    $plugin->volume_import($over_zfs, 'over_zfs', $stream, $volume, 'raw+size', undef, undef, 0, 1),
    'over_zfs:made',
    'an imported volume can get another name'
);
my $copied = "dd of=/dev/thin/made bs=64k status=none conv=fsync,sparse";
is(noted()->[0], $copied, 'and its data are copied');
$plugin->volume_import($over_zfs, 'over_zfs', $stream, 'vm-100-lost', 'raw+size', undef, undef, 0, 0);
is_deeply(
    noted(),
    [
        $copied =~ s/made/vm-100-lost/r,
        'volume_import_formats vm-100-lost',
        'alloc_image 100 ' . ((1 << 20) + 1),
        'activate_volume zfs - vm-100-lost - -',
        'volume_has_feature - sparseinit zfs vm-100-lost',
        'deactivate_volume zfs - vm-100-lost - -',
    ],
    'a new volume is large enough'
);
$PVE::Tools::fail = '^dd';
ok(
    !eval { $plugin->volume_import($over_zfs, 'over_zfs', $stream, 'vm-100-lost', 'raw+size', undef, undef, 0, 0); 1 },
    'an import can fail'
);
is(noted()->[-1], 'free_image zfs - vm-100-lost 0 raw', 'and then leaves no volume behind');
$PVE::Tools::fail = '';
ok(!eval { $plugin->alloc_image('cached', $scfg, 100, 'qcow2', undef, 1); 1 }, 'raw volumes only');
is_deeply(
    [map { $_->{volid} } @{ $plugin->list_images('cached', $scfg, 100) }],
    ['cached:vm-100-disk-0'],
    "the base storage's raw volumes of VMs are listed as this storage's"
);
for my $wanted (["cached:$volume"], ["local:$volume"]) {
    my @listed = map { $_->{volid} } @{ $plugin->list_images('cached', $scfg, undef, $wanted, {}) };
    is_deeply(\@listed, [grep { m/^cached:/ } @$wanted], "of the volumes @$wanted, those of this storage are listed");
}
for my $storeid (qw(nested remote)) {
    my $bad = $PVE::Storage::config->{ids}->{$storeid};
    ok(!eval { $plugin->status($storeid, $bad); 1 }, "'$storeid' is refused: $@");
}

done_testing();
