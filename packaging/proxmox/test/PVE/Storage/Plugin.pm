package PVE::Storage::Plugin;
# A stub of the base class, with one storage below hob's that notes its calls.
use strict;
use warnings;

our @calls;
our @SHARED_STORAGE = ('nfs', 'rbd');

sub lookup {
    my ($class, $type) = @_;
    return $type eq 'stub' ? 'PVE::Storage::Stub' : die "no plugin '$type'\n";
}

sub write_common_header($$) { my ($fh, $size) = @_; push @calls, "write_common_header $size"; }

sub read_common_header($) { return (1 << 30) + 1; }

package PVE::Storage::Stub;
use strict;
use warnings;

our $AUTOLOAD;

sub path {
    my ($class, $scfg, $volname) = @_;
    my $path = ($scfg->{path} // '/dev/thin') . "/$volname";
    return wantarray ? ($path, 100, 'images') : $path;
}

# Sizes are tainted with perl -T, as those of the LVM plugins are.
sub volume_size_info {
    my ($class, $scfg, $storeid, $volname) = @_;
    die "no volume $volname\n" if $volname =~ m/lost/;
    my $size = int(($volname =~ m/small/ ? 4 << 20 : 1 << 30) . substr($ENV{PATH}, 0, 0));
    return wantarray ? ($size, 'raw', 0, undef) : $size;
}

sub list_images {
    my ($class, $storeid, $scfg, $vmid, $vollist) = @_;
    my @images = (
        { volid => 'local:vm-100-disk-0', format => 'raw' },
        { volid => 'local:100/x.qcow2', format => 'qcow2' },
        { volid => 'local:base-9-disk-0', format => 'raw' },
    );
    my %wanted = map { $_ => 1 } @{ $vollist // [] };
    return [grep { !$vollist || $wanted{ $_->{volid} } } @images];
}

sub alloc_image {
    my ($class, $storeid, $scfg, $vmid, $fmt, $name, $size) = @_;
    push @PVE::Storage::Plugin::calls, "alloc_image $vmid $size" if $storeid eq 'zfs';
    return $name // 'made';
}

sub parse_volname { my ($class, $volname) = @_; return ('images', $volname, 100, undef, undef, 0, 'raw'); }

sub volume_export_formats { my ($class, $scfg) = @_; return @{ $scfg->{formats} // ['raw+size'] }; }

sub volume_import_formats {
    my ($class, $scfg, $storeid, $volname) = @_;
    push @PVE::Storage::Plugin::calls, "volume_import_formats $volname";
    return @{ $scfg->{formats} // ['raw+size'] };
}

sub AUTOLOAD {
    my ($class, @args) = @_;
    my $name = $AUTOLOAD =~ s/.*:://r;
    return if $name eq 'DESTROY';
    push @PVE::Storage::Plugin::calls, join(' ', $name, map { ref($_) ? '-' : $_ // '-' } @args);
    return "local:made";
}

1;
