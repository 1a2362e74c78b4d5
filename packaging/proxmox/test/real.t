#!/usr/bin/perl -T
# Tests of HobPlugin.pm with Proxmox VE's own modules. On a node, as root:
#     perl -T packaging/proxmox/test/real.t
# Elsewhere, with checkouts of pve-storage, pve-common, pve-cluster, pve-access-control, pve-guest-common, pve-firewall,
# pve-network, pve-ha-manager and qemu-server, `-I REPOSITORY/src` for each of them, and the Perl libraries of Debian that
# they need.
#
# A script replaces `hob`. The base storage is a temporary directory. No VM is started, and no configuration is changed.
use strict;
use warnings;

use File::Temp qw(tempdir);
use FindBin;
use Test::More;

my ($scratch, $plugin_file, @warnings);

BEGIN {
    ($plugin_file) = map { m/^(.+)$/ } "$FindBin::Bin/../HobPlugin.pm";
    $scratch = tempdir(CLEANUP => 1);
    mkdir "$scratch/images";
    open(my $hob, '>', "$scratch/hob") or die "cannot write: $!\n";
    print $hob <<"SCRIPT";
#!/bin/sh
cd $scratch
case "\$1 \$2" in
    'disk list') cat disks; exit ;;
    'pool show') exit ;;
    'disk add') echo "[{\\"name\\":\\"\$3\\",\\"backing\\":\\"\$5\\",\\"cache\\":null}]" > disks ;;
    'cache enable') sed -i 's/"cache":null/"cache":{"mode":"write-back"}/' disks ;;
    'disk remove') echo '[]' > disks ;;
esac
echo "\$*" >> commands
SCRIPT
    close($hob);
    chmod 0755, "$scratch/hob";
    $ENV{PATH} = "$scratch:/sbin:/bin:/usr/sbin:/usr/bin";
    delete @ENV{qw(IFS CDPATH ENV BASH_ENV)};
    $SIG{__WARN__} = sub { push @warnings, $_[0]; };

    # Outside a node, empty packages replace the modules that are not Perl.
    my $is_node = grep { -e "$_/auto/PVE/IPCC/IPCC.so" } @INC;
    unshift @INC, sub {
        my (undef, $file) = @_;
        return if $is_node || $file !~ m!^(?:PVE/(?:RS/|APIClient/|IPCC|RADOS|Cluster/IPCConst)|Proxmox/RS/|RRDs)!;
        my $package = $file =~ s!/!::!gr =~ s!\.pm$!!r;
        my $constants = '';
        if ($package eq 'PVE::Cluster::IPCConst') {
            my @names = map { "CFS_IPC_$_" } qw(GET_FS_VERSION GET_CLUSTER_INFO GET_GUEST_LIST SET_STATUS GET_STATUS GET_CONFIG
                LOG_CLUSTER_MSG GET_CLUSTER_LOG GET_RRD_DUMP GET_GUEST_CONFIG_PROPERTY VERIFY_TOKEN GET_GUEST_CONFIG_PROPERTIES);
            $constants = "use base 'Exporter'; our \@EXPORT = qw(@names);" . join('', map { "sub $_() { 0 }" } @names);
        }
        my $text = "package $package; $constants our \$AUTOLOAD; sub AUTOLOAD { return } 1;";
        open(my $source, '<', \$text) or die "cannot read: $!\n";
        return $source;
    };

    # Proxmox VE loads plugins only from its own directory, and closes the list of storage types with init().
    require PVE::Storage::Plugin;
    my $init = PVE::Storage::Plugin->can('init');
    no warnings 'redefine';
    *PVE::Storage::Plugin::init = sub {
        my ($class) = @_;
        # An installed plugin is tested instead of the one beside this test.
        if (!eval { $class->lookup('hob') }) {
            require $plugin_file;
            PVE::Storage::Custom::HobPlugin->register();
        }
        return $init->($class);
    };
}

use PVE::INotify;
use PVE::RPCEnvironment;
use PVE::Storage;

my $storages = <<"STORAGES";
dir: files
	path $scratch
	content images

nfs: nas
	server 192.0.2.1
	export /data
	path /mnt/pve/nas
	content images

hob: cached
	hob-base files
	hob-pool flash
	hob-percent 20
	hob-preset auto
	content images
	bwlimit clone=1000
	nodes ${\ PVE::INotify::nodename()}

hob: remote
	hob-base nas
	hob-pool flash
STORAGES

my $cfg = PVE::Storage::Plugin->parse_config('storage.cfg', $storages);
{
    no warnings 'redefine';
    *PVE::Storage::config = sub { return $cfg; };
}

my $version = PVE::Storage::APIVER();
my $plugin = PVE::Storage::Plugin->lookup('hob');
my ($loaded) = grep { m/HobPlugin/ } values %INC;
diag("storage API $version, $loaded");
is_deeply(\@warnings, [], 'the plugin is loaded, and the storages are read, without a warning');
is($plugin->api(), $version, 'the plugin has the API of this Proxmox VE');
ok($version - PVE::Storage::APIAGE() <= $plugin->api(), 'which accepts it');
like(PVE::Storage::Plugin->write_config('storage.cfg', $cfg), qr/^hob: cached\n(?:\t.*\n)*\thob-percent 20\n/m, 'the storage is written');
PVE::RPCEnvironment->setup_default_cli_env();

# Returns the commands that changed hob's disks since the last time.
sub commands {
    open(my $in, '<', "$scratch/commands") or return [];
    chomp(my @commands = <$in>);
    unlink "$scratch/commands";
    return \@commands;
}

sub disks {
    my ($text) = @_;
    open(my $out, '>', "$scratch/disks") or die "cannot write: $!\n";
    print $out "$text\n";
    close($out);
}
disks('[]');

sub alloc {
    my ($kib, $name) = @_;
    return PVE::Storage::vdisk_alloc($cfg, 'cached', 100, 'raw', $name, $kib);
}

my $disk = alloc(1 << 20);
my $backing = "$scratch/images/100/vm-100-disk-0.raw";
my $export = 'nbd+unix:///cached-100-vm-100-disk-0.raw?socket=/run/hob/nbd.sock';
is($disk, 'cached:100/vm-100-disk-0.raw', 'the base storage allocates a volume');
is(scalar(PVE::Storage::path($cfg, $disk)), $export, 'the path leads to hob before the volume is active');
PVE::Storage::activate_volumes($cfg, [$disk]);
is_deeply(
    commands(),
    [
        "disk add cached-100-vm-100-disk-0.raw --backing $backing --format raw",
        'cache enable cached-100-vm-100-disk-0.raw --pool flash --size ' . int((1 << 30) / 5) . ' --preset auto',
    ],
    'an activated volume is served with a cache'
);
PVE::Storage::activate_volumes($cfg, [$disk]);
is_deeply(commands(), [], 'only once');
is(scalar(PVE::Storage::path($cfg, $disk)), $export, 'the path stays the same');
if ($version >= 12) {
    my $options = PVE::Storage::qemu_blockdev_options($cfg, $disk, '10.0+pve0', {});
    is($options->{'reconnect-delay'}, 300, 'Proxmox VE accepts the options of the block node');
    is(PVE::Storage::volume_qemu_snapshot_method($cfg, $disk), 'storage', 'the base storage takes snapshots');
}

for my $small (alloc(4096), alloc(4096, 'vm-100-cloudinit'), alloc(1 << 17, 'vm-100-state-suspend-2026-01-01')) {
    my $path = "$scratch/images/" . $small =~ s/^cached://r;
    PVE::Storage::activate_volumes($cfg, [$small]);
    is(scalar(PVE::Storage::path($cfg, $small)), $path, "$small is used without hob");
    is(PVE::Storage::map_volume($cfg, $small), $path, 'also by other programs than QEMU');
    is(PVE::Storage::qemu_blockdev_options($cfg, $small, '10.0+pve0', {})->{filename}, $path, 'and as a block node') if $version >= 12;
}
ok(!eval { PVE::Storage::map_volume($cfg, $disk); 1 }, 'a volume that hob serves is no file');
is_deeply(commands(), [], 'hob does not serve these volumes');

my $template = PVE::Storage::vdisk_alloc($cfg, 'files', 900, 'raw', 'base-900-disk-0.raw', 4096);
my $listed = PVE::Storage::vdisk_list($cfg, 'cached')->{cached};
is(scalar(@$listed), 4, "'$template' is not listed");
is(scalar(@{ PVE::Storage::volume_list($cfg, 'cached') }), 4, 'nor in the content of the storage');
is_deeply([map { $_->{volid} } @{ PVE::Storage::vdisk_list($cfg, 'cached', undef, [$disk])->{cached} }], [$disk], 'a chosen volume is listed');
is((PVE::Storage::volume_size_info($cfg, $disk, 10))[0], 1 << 30, 'a volume has the size of its base volume');

my %features = map { $_ => PVE::Storage::volume_has_feature($cfg, $_, $disk) } qw(clone copy replicate snapshot template rename);
is_deeply([sort grep { $features{$_} } keys %features], ['copy', 'rename'], 'raw files can be copied and renamed');
ok(!eval { PVE::Storage::vdisk_create_base($cfg, $disk); 1 }, "no templates: $@");
ok(!eval { PVE::Storage::volume_resize($cfg, $disk, 2 << 30, 1); 1 }, "a running VM's volume is not resized: $@");
is_deeply([PVE::Storage::volume_import_formats($cfg, $disk, undef, undef, 0)], ['raw+size'], 'a file can be imported');
is_deeply([PVE::Storage::volume_import_formats($cfg, 'cached:vm-100-disk-9', undef, undef, 0)], ['raw+size'], 'and a device');

my $info = PVE::Storage::storage_info($cfg, 'images', 1);
ok($info->{cached}->{active} && $info->{cached}->{total} > 0, 'the storage is active');
ok(!$info->{remote}->{active}, 'a shared base storage is refused');

SKIP: {
    skip('no qemu-server', 5) if !eval { require PVE::QemuServer; require PVE::QemuServer::Drive; 1 };
    my $conf = { scsi0 => "$disk,size=1G" };
    ok(PVE::QemuServer::Drive::is_volume_in_use($cfg, $conf, undef, $disk), 'qemu-server finds the volume of a disk');
    my $base_volume = $disk =~ s/^cached:/files:/r;
    ok(PVE::QemuServer::Drive::is_volume_in_use($cfg, $conf, undef, $base_volume), 'and that the base volume is in use');
    ok(!PVE::QemuServer::Drive::is_volume_in_use($cfg, $conf, undef, 'files:100/vm-100-disk-1.raw'), 'and other volumes are not');
    delete $cfg->{ids}->@{qw(nas remote local)};
    my $scanned = PVE::QemuServer::scan_volids($cfg, 100);
    is($scanned->{$disk}->{path}, $backing, 'a rescan finds the path of the base volume');
    PVE::QemuServer::update_disk_config(100, $conf, { map { $_ => $scanned->{$_} } $disk, $base_volume });
    is_deeply([grep { m/^unused/ } keys %$conf], [], 'and adds no unused disk');
}

my $renamed = PVE::Storage::rename_volume($cfg, $disk, 101);
is($renamed, 'cached:101/vm-101-disk-0.raw', 'a volume is renamed');
is_deeply(commands(), ['disk remove cached-100-vm-100-disk-0.raw'], 'after hob has removed its disk');
PVE::Storage::activate_volumes($cfg, [$renamed]);
commands();
PVE::Storage::deactivate_volumes($cfg, [$renamed]);
is_deeply(commands(), ['disk remove cached-101-vm-101-disk-0.raw'], 'a volume is drained before it is deactivated');
PVE::Storage::vdisk_free($cfg, $renamed);
ok(!-e "$scratch/images/101/vm-101-disk-0.raw", 'the base storage deletes a volume');

done_testing();
