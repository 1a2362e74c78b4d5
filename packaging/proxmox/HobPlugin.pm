package PVE::Storage::Custom::HobPlugin;

# A storage of the type "hob": the volumes of another storage, with a cache on local flash by hob.
#
# Install it as /usr/share/perl5/PVE/Storage/Custom/HobPlugin.pm on each node, and restart pvedaemon, pveproxy and pvestatd.
# In /etc/pve/storage.cfg:
#
#     hob: cached
#         hob-base local-lvm
#         hob-pool flash
#         content images
#
# Volumes belong to the base storage, which allocates, lists, resizes and deletes them and takes their snapshots. While a
# volume is active, hob serves it, and QEMU uses it over NBD. docs/QUICKSTART_PROXMOX.md says what works and what does not.

use strict;
use warnings;

use Cwd qw(realpath);
use JSON;
use PVE::Storage;
use PVE::Storage::Plugin;
use PVE::Tools qw(run_command);

use base qw(PVE::Storage::Plugin);

# hob's NBD socket.
my $SOCKET = '/run/hob/nbd.sock';

# Seconds for commands that do not drain.
my $COMMAND_SECONDS_MAX = 60;

# The smallest cache, in bytes. hob does not serve smaller volumes, such as TPM states and EFI variables.
my $CACHE_MIN_BYTES = 64 * 1024 * 1024;

# Seconds to read the size of a volume.
my $SIZE_SECONDS_MAX = 10;

sub api {
    my $known = 15;
    my $offered = PVE::Storage::APIVER();
    return $offered < $known ? $offered : $known;
}

sub type { return 'hob'; }

sub plugindata {
    return {
        content => [{ images => 1, none => 1 }, { images => 1 }],
        format => [{ raw => 1 }, 'raw'],
        'sensitive-properties' => {},
    };
}

sub properties {
    return {
        'hob-base' => { description => "Storage that has the volumes.", type => 'string', format => 'pve-storage-id' },
        'hob-pool' => { description => "hob's pool of flash.", type => 'string' },
        'hob-percent' => {
            description => "Size of a volume's cache, in percent of the volume.",
            type => 'integer',
            minimum => 1,
            maximum => 100,
            default => 10,
        },
        'hob-preset' => { description => "Preset of the caches; see hob's presets.", type => 'string' },
    };
}

sub options {
    return {
        'hob-base' => { fixed => 1 },
        'hob-pool' => { optional => 0 },
        'hob-percent' => { optional => 1 },
        'hob-preset' => { optional => 1 },
        content => { optional => 1 },
        nodes => { optional => 1 },
        disable => { optional => 1 },
        bwlimit => { optional => 1 },
    };
}

# Returns the base storage: its plugin, configuration and identifier.
my sub base {
    my ($scfg) = @_;
    my $storeid = $scfg->{'hob-base'};
    my $base = PVE::Storage::storage_config(PVE::Storage::config(), $storeid);
    die "the base storage '$storeid' is of the type 'hob' itself\n" if $base->{type} eq 'hob';
    # Proxmox VE would start a migrated VM on another node, whose hob knows nothing of this one's dirty data.
    my @shared_types = @PVE::Storage::Plugin::SHARED_STORAGE;
    die "the base storage '$storeid' is shared between nodes; hob caches volumes of local storages\n"
        if $base->{shared} || grep { $_ eq $base->{type} } @shared_types;
    return (PVE::Storage::Plugin->lookup($base->{type}), $base, $storeid);
}

# The name of hob's disk. Different volumes of a storage have different names: characters that hob does not allow become
# ".xHH.", with their code, and so does a dot before a text that looks like such a code. 'hob attach' uses the same names
# (Volumes::disk in crates/cli/src/attach/proxmox.rs).
my sub disk_name {
    my ($storeid, $volname) = @_;
    utf8::encode($volname) if utf8::is_utf8($volname);
    # The directory of a VM.
    $volname =~ s!^(\d+)/!$1-!;
    $volname =~ s!([^A-Za-z0-9._-]|\.(?=x[0-9a-f]{2}\.))!sprintf(".x%02x.", ord($1))!ge;
    return "$storeid-$volname";
}

# Dies if hob's disk has another backing than the base volume at $path.
my sub check_backing {
    my ($disk, $path) = @_;
    my $backing = $disk->{backing};
    my $real = sub { realpath($_[0]) // $_[0] };
    die "hob's disk $disk->{name} belongs to $backing, not to $path; remove it with 'hob disk remove $disk->{name}'\n"
        if $backing ne $path && $real->($backing) ne $real->($path);
}

my sub hob {
    my ($args, %options) = @_;
    my $output = '';
    my $collect = sub { $output .= "$_[0]\n"; };
    run_command(['hob', @$args], outfunc => $collect, errmsg => "hob $args->[0] $args->[1]", %options);
    return $output;
}

# Returns hob's disk of a volume, or undef.
my sub served {
    my ($storeid, $volname) = @_;
    my $name = disk_name($storeid, $volname);
    my $disks = decode_json(hob(['disk', 'list', '-o', 'json'], timeout => $COMMAND_SECONDS_MAX));
    return (grep { $_->{name} eq $name } @$disks)[0];
}

# Drains and removes hob's disk of a volume, if there is one.
my sub remove {
    my ($storeid, $volname, $path) = @_;
    my $disk = served($storeid, $volname) or return;
    check_backing($disk, $path);
    hob(['disk', 'remove', disk_name($storeid, $volname)]);
}

# Returns true if hob serves the volume while it is active. The answer must not depend on whether the volume is active,
# because Proxmox VE 8 asks for the path of a disk before it activates the disk's volume.
my sub is_cacheable {
    my ($scfg, $storeid, $volname) = @_;
    # 'hob attach' attaches any volume.
    return 1 if served($storeid, $volname);
    # Saved states are read only once. The path of a cloud-init image is needed before the image exists.
    return 0 if $volname =~ m!^(?:\d+/)?vm-\d+-(?:state-|cloudinit(?:\.raw)?$)!;
    my ($plugin, $base, $baseid) = base($scfg);
    my ($size) = eval { $plugin->volume_size_info($base, $baseid, $volname, $SIZE_SECONDS_MAX) };
    # A volume of unknown size may be in the cache, so its path must not bypass hob.
    return !defined($size) || $size >= $CACHE_MIN_BYTES;
}

# Returns true if Proxmox VE compares paths to find out whether a VM uses a volume. The path must then be the one that the
# volume has on the base storage. Otherwise Proxmox VE reports the volume of the base storage as an unused disk, which an
# administrator could delete.
my sub is_compared {
    for (my $level = 1; my $name = (caller($level))[3]; $level++) {
        return 1 if $name =~ m/::(?:scan_volids|is_volume_in_use)$/;
    }
    return 0;
}

sub parse_volname {
    my ($class, $volname) = @_;
    # Names of volumes in directories have the VM's number and an extension. Names in LVM, ZFS and others have neither.
    if ($volname =~ m!^(?:(\d+)/)?(vm-(\d+)-[^/\s]+?)(?:\.raw)?$!) {
        my ($vmid, $name) = ($1 // $3, $2);
        die "'$volname' is not a raw volume\n" if $name =~ m/\.(qcow2|vmdk|subvol)$/;
        return ('images', $name, $vmid, undef, undef, 0, 'raw');
    }
    die "unable to parse the volume name '$volname'; hob caches raw volumes of VMs\n";
}

sub path {
    my ($class, $scfg, $volname, $storeid, $snapname) = @_;
    my ($vtype, undef, $vmid) = $class->parse_volname($volname);
    my ($plugin, $base, $baseid) = base($scfg);
    if (defined($snapname) || is_compared() || !is_cacheable($scfg, $storeid, $volname)) {
        my ($path) = $plugin->path($base, $volname, $baseid, $snapname);
        return wantarray ? ($path, $vmid, $vtype) : $path;
    }
    my $path = "nbd+unix:///" . disk_name($storeid, $volname) . "?socket=$SOCKET";
    return wantarray ? ($path, $vmid, $vtype) : $path;
}

sub filesystem_path {
    my ($class, $scfg, $volname, $snapname) = @_;
    my ($plugin, $base) = base($scfg);
    return $plugin->filesystem_path($base, $volname, $snapname);
}

sub qemu_blockdev_options {
    my ($class, $scfg, $storeid, $volname, $machine_version, $options) = @_;
    if (defined($options->{'snapshot-name'}) || !is_cacheable($scfg, $storeid, $volname)) {
        my ($plugin, $base, $baseid) = base($scfg);
        return $plugin->qemu_blockdev_options($base, $baseid, $volname, $machine_version, $options);
    }
    return {
        driver => 'nbd',
        server => { type => 'unix', path => $SOCKET },
        export => disk_name($storeid, $volname),
        'reconnect-delay' => 300,
    };
}

sub volume_qemu_snapshot_method { return 'storage'; }

sub activate_storage {
    my ($class, $storeid, $scfg, $cache) = @_;
    my (undef, undef, $baseid) = base($scfg);
    hob(['pool', 'show', $scfg->{'hob-pool'}], timeout => $COMMAND_SECONDS_MAX);
    # Unlike the method of the base's plugin, this checks that the base storage is enabled, and available on this node.
    PVE::Storage::activate_storage(PVE::Storage::config(), $baseid, $cache);
    return 1;
}

# The base storage may have other users.
sub deactivate_storage { return 1; }

sub status {
    my ($class, $storeid, $scfg, $cache) = @_;
    my ($plugin, $base, $baseid) = base($scfg);
    return $plugin->status($baseid, $base, $cache);
}

sub activate_volume {
    my ($class, $storeid, $scfg, $volname, $snapname, $cache, $hints) = @_;
    my ($plugin, $base, $baseid) = base($scfg);
    $plugin->activate_volume($baseid, $base, $volname, $snapname, $cache, $hints);
    return 1 if defined($snapname) || !is_cacheable($scfg, $storeid, $volname);
    my $disk = served($storeid, $volname);
    my ($path) = $plugin->path($base, $volname, $baseid);
    check_backing($disk, $path) if $disk;
    return 1 if $disk && $disk->{cache};

    my $name = disk_name($storeid, $volname);
    if (!$disk) {
        hob(['disk', 'add', $name, '--backing', $path, '--format', 'raw'], timeout => $COMMAND_SECONDS_MAX);
    }
    my ($size) = $plugin->volume_size_info($base, $baseid, $volname, $SIZE_SECONDS_MAX);
    # Sizes that the LVM plugin reads are tainted.
    ($size) = ($size // '') =~ m/^(\d+)$/ or die "cannot read the size of $volname\n";
    my $bytes = int($size * ($scfg->{'hob-percent'} // 10) / 100);
    $bytes = $CACHE_MIN_BYTES if $bytes < $CACHE_MIN_BYTES;
    my @preset = $scfg->{'hob-preset'} ? ('--preset', $scfg->{'hob-preset'}) : ();
    my @enable = ('cache', 'enable', $name, '--pool', $scfg->{'hob-pool'}, '--size', $bytes, @preset);
    # A VM starts without a cache if the pool is full.
    eval { hob(\@enable, timeout => $COMMAND_SECONDS_MAX); };
    warn "$volname has no cache: $@" if $@;
    return 1;
}

# Programs that are not QEMU, such as swtpm, need a file or a device.
sub map_volume {
    my ($class, $storeid, $scfg, $volname, $snapname, $hints) = @_;
    die "hob serves $volname over NBD, not as a file or device; move it to the storage '$scfg->{'hob-base'}'\n"
        if !defined($snapname) && is_cacheable($scfg, $storeid, $volname);
    my ($plugin, $base, $baseid) = base($scfg);
    return $plugin->map_volume($baseid, $base, $volname, $snapname, $hints);
}

sub unmap_volume {
    my ($class, $storeid, $scfg, $volname, $snapname) = @_;
    my ($plugin, $base, $baseid) = base($scfg);
    return $plugin->unmap_volume($baseid, $base, $volname, $snapname);
}

sub deactivate_volume {
    my ($class, $storeid, $scfg, $volname, $snapname, $cache) = @_;
    my ($plugin, $base, $baseid) = base($scfg);
    # This drains the cache. If it fails, the volume stays active, with its dirty data.
    remove($storeid, $volname, $plugin->path($base, $volname, $baseid)) if !defined($snapname);
    return $plugin->deactivate_volume($baseid, $base, $volname, $snapname, $cache);
}

sub alloc_image {
    my ($class, $storeid, $scfg, $vmid, $fmt, $name, $size) = @_;
    die "hob caches raw volumes, not '$fmt'\n" if $fmt ne 'raw';
    my ($plugin, $base, $baseid) = base($scfg);
    # Proxmox VE gives names without an extension, because this storage has no directory.
    $name .= '.raw' if defined($name) && $base->{path} && $name !~ m/\.raw$/;
    return $plugin->alloc_image($baseid, $base, $vmid, $fmt, $name, $size);
}

sub free_image {
    my ($class, $storeid, $scfg, $volname, $isBase, $format) = @_;
    my ($plugin, $base, $baseid) = base($scfg);
    remove($storeid, $volname, $plugin->path($base, $volname, $baseid));
    return $plugin->free_image($baseid, $base, $volname, $isBase, $format);
}

sub list_images {
    my ($class, $storeid, $scfg, $vmid, $vollist, $cache) = @_;
    my ($plugin, $base, $baseid) = base($scfg);
    # The list may have volumes of other storages.
    my $wanted = $vollist ? [map { m/^\Q$storeid\E:(.+)$/ ? "$baseid:$1" : () } @$vollist] : undef;
    my $images = $plugin->list_images($baseid, $base, $vmid, $wanted, $cache);
    my $is_ours = sub { eval { $class->parse_volname($_[0] =~ s/^\Q$baseid\E://r) } };
    my @ours = grep { ($_->{format} // 'raw') eq 'raw' && $is_ours->($_->{volid}) } @$images;
    return [map { { %$_, volid => $_->{volid} =~ s/^\Q$baseid\E:/$storeid:/r } } @ours];
}

sub volume_size_info {
    my ($class, $scfg, $storeid, $volname, $timeout) = @_;
    my ($plugin, $base, $baseid) = base($scfg);
    return $plugin->volume_size_info($base, $baseid, $volname, $timeout);
}

sub volume_resize {
    my ($class, $scfg, $storeid, $volname, $size, $running, $snapname) = @_;
    # QEMU learns the size of an NBD export when it connects.
    die "stop the VM to resize a volume on a storage of the type 'hob'\n" if $running;
    my ($plugin, $base, $baseid) = base($scfg);
    my $resized = $plugin->volume_resize($base, $baseid, $volname, $size, $running, $snapname);
    hob(['disk', 'resize', disk_name($storeid, $volname)]) if served($storeid, $volname);
    return $resized;
}

# Runs code while the base volume has every acknowledged write: under write-back the cache writes through meanwhile.
my sub written_through {
    my ($storeid, $volname, $code) = @_;
    my $disk = served($storeid, $volname);
    my $mode = $disk && $disk->{cache} ? $disk->{cache}->{mode} : '';
    return $code->() if $mode ne 'write-back';
    my $name = disk_name($storeid, $volname);
    hob(['cache', 'set', $name, '--mode', 'write-through']);
    my $result = eval { $code->() };
    my $error = $@;
    eval { hob(['cache', 'set', $name, '--mode', $mode]); };
    warn "$volname stays in write-through: $@" if $@;
    die $error if $error;
    return $result;
}

sub volume_snapshot {
    my ($class, $scfg, $storeid, $volname, $snap) = @_;
    my ($plugin, $base, $baseid) = base($scfg);
    return written_through($storeid, $volname, sub { $plugin->volume_snapshot($base, $baseid, $volname, $snap) });
}

sub volume_snapshot_delete {
    my ($class, $scfg, $storeid, $volname, $snap, $running) = @_;
    my ($plugin, $base, $baseid) = base($scfg);
    return $plugin->volume_snapshot_delete($base, $baseid, $volname, $snap, $running);
}

sub volume_rollback_is_possible {
    my ($class, $scfg, $storeid, $volname, $snap, $blockers) = @_;
    my ($plugin, $base, $baseid) = base($scfg);
    return $plugin->volume_rollback_is_possible($base, $baseid, $volname, $snap, $blockers);
}

sub volume_snapshot_rollback {
    my ($class, $scfg, $storeid, $volname, $snap) = @_;
    my ($plugin, $base, $baseid) = base($scfg);
    # The cached data from before the rollback is stale.
    remove($storeid, $volname, $plugin->path($base, $volname, $baseid));
    return $plugin->volume_snapshot_rollback($base, $baseid, $volname, $snap);
}

sub volume_snapshot_info {
    my ($class, $scfg, $storeid, $volname) = @_;
    my ($plugin, $base, $baseid) = base($scfg);
    return $plugin->volume_snapshot_info($base, $baseid, $volname);
}

sub volume_has_feature {
    my ($class, $scfg, $feature, $storeid, $volname, $snapname, $running, $opts) = @_;
    my ($plugin, $base, $baseid) = base($scfg);
    return undef if $feature ne 'copy' && $feature ne 'snapshot' && $feature ne 'sparseinit' && $feature ne 'rename';
    return $plugin->volume_has_feature($base, $feature, $baseid, $volname, $snapname, $running, $opts);
}

sub rename_volume {
    my ($class, $scfg, $storeid, $source, $vmid, $target) = @_;
    my ($plugin, $base, $baseid) = base($scfg);
    # The names of hob's disks have the names of volumes.
    remove($storeid, $source, $plugin->path($base, $source, $baseid));
    my $renamed = $plugin->rename_volume($base, $baseid, $source, $vmid, $target);
    return $renamed =~ s/^\Q$baseid\E:/$storeid:/r;
}

sub create_base { die "templates are not possible on a storage of the type 'hob'; make them on its base storage\n"; }

sub clone_image { die "linked clones are not possible on a storage of the type 'hob'\n"; }

# The plugin copies volumes itself if the base storage's plugin cannot. ZFS exports only snapshots, and Proxmox VE takes a
# snapshot for a migration only if the type of the storage is 'zfspool'.
my $RAW = 'raw+size';

sub volume_export_formats {
    my ($class, $scfg, $storeid, $volname, $snapshot, $base_snapshot, $with_snapshots) = @_;
    my ($plugin, $base, $baseid) = base($scfg);
    my @formats = $plugin->volume_export_formats($base, $baseid, $volname, $snapshot, $base_snapshot, $with_snapshots);
    return @formats if defined($snapshot);
    @formats = grep { $_ ne 'zfs' } @formats;
    return @formats if @formats || $with_snapshots;
    return ($RAW);
}

my sub export_raw {
    my ($plugin, $base, $baseid, $fh, $volname) = @_;
    my ($size) = $plugin->volume_size_info($base, $baseid, $volname, $SIZE_SECONDS_MAX);
    my ($path) = $plugin->path($base, $volname, $baseid);
    PVE::Storage::Plugin::write_common_header($fh, $size);
    run_command(['dd', "if=$path", 'bs=1M', 'status=none'], output => '>&' . fileno($fh));
}

sub volume_export {
    my ($class, $scfg, $storeid, $fh, $volname, $format, @more) = @_;
    my ($plugin, $base, $baseid) = base($scfg);
    my $is_known = grep { $_ eq $format } $plugin->volume_export_formats($base, $baseid, $volname, @more);
    my $export = sub {
        return export_raw($plugin, $base, $baseid, $fh, $volname) if $format eq $RAW && !$is_known;
        return $plugin->volume_export($base, $baseid, $fh, $volname, $format, @more);
    };
    return written_through($storeid, $volname, $export);
}

# The name that an imported volume has on the base storage. It may come from a storage of another type.
my sub import_name {
    my ($class, $base, $volname) = @_;
    my (undef, $name, $vmid) = $class->parse_volname($volname);
    return $base->{path} ? "$vmid/$name.raw" : $name;
}

sub volume_import_formats {
    my ($class, $scfg, $storeid, $volname, $snapshot, $base_snapshot, $with_snapshots) = @_;
    my ($plugin, $base, $baseid) = base($scfg);
    my $name = import_name($class, $base, $volname);
    my @formats = $plugin->volume_import_formats($base, $baseid, $name, $snapshot, $base_snapshot, $with_snapshots);
    push @formats, $RAW if !$with_snapshots && !defined($base_snapshot) && !grep { $_ eq $RAW } @formats;
    return @formats;
}

# Returns the volume's name on the base storage.
my sub import_raw {
    my ($plugin, $base, $baseid, $fh, $name, $allow_rename) = @_;
    my ($size) = PVE::Storage::Plugin::read_common_header($fh);
    my (undef, $image, $vmid) = $plugin->parse_volname($name);
    my $exists = eval { ($plugin->volume_size_info($base, $baseid, $name, $SIZE_SECONDS_MAX))[0] };
    die "volume '$baseid:$name' exists already\n" if $exists && !$allow_rename;
    $image = undef if $exists;
    my $volname = $plugin->alloc_image($baseid, $base, $vmid, 'raw', $image, int(($size + 1023) / 1024));
    eval {
        $plugin->activate_volume($baseid, $base, $volname, undef, {});
        my ($path) = $plugin->path($base, $volname, $baseid);
        my $is_zero = $plugin->volume_has_feature($base, 'sparseinit', $baseid, $volname);
        my $conv = $is_zero ? 'conv=fsync,sparse' : 'conv=fsync';
        run_command(['dd', "of=$path", 'bs=64k', 'status=none', $conv], input => '<&' . fileno($fh));
        $plugin->deactivate_volume($baseid, $base, $volname, undef, {});
    };
    my $error = $@ or return $volname;
    eval { $plugin->free_image($baseid, $base, $volname, 0, 'raw') };
    warn $@ if $@;
    die $error;
}

sub volume_import {
    my ($class, $scfg, $storeid, $fh, $volname, $format, @more) = @_;
    my ($plugin, $base, $baseid) = base($scfg);
    my $name = import_name($class, $base, $volname);
    my ($snapshot, $base_snapshot, $with_snapshots, $allow_rename) = @more;
    my $is_known = grep { $_ eq $format }
        $plugin->volume_import_formats($base, $baseid, $name, $snapshot, $base_snapshot, $with_snapshots);
    return "$storeid:" . import_raw($plugin, $base, $baseid, $fh, $name, $allow_rename) if $format eq $RAW && !$is_known;
    my $volid = $plugin->volume_import($base, $baseid, $fh, $name, $format, @more) // "$baseid:$name";
    return $volid =~ s/^\Q$baseid\E:/$storeid:/r;
}

1;
