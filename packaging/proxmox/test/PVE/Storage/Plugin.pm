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

package PVE::Storage::Stub;
use strict;
use warnings;

our $AUTOLOAD;

sub path { my ($class, $scfg, $volname) = @_; return wantarray ? ("$scfg->{path}/$volname", 100, 'images') : "$scfg->{path}/$volname"; }

sub volume_size_info { return wantarray ? (1 << 30, 'raw', 0, undef) : 1 << 30; }

sub list_images {
    return [{ volid => 'local:vm-100-disk-0', format => 'raw' }, { volid => 'local:100/x.qcow2', format => 'qcow2' }];
}

sub AUTOLOAD {
    my ($class, @args) = @_;
    my $name = $AUTOLOAD =~ s/.*:://r;
    return if $name eq 'DESTROY';
    push @PVE::Storage::Plugin::calls, join(' ', $name, map { ref($_) ? '-' : $_ // '-' } @args);
    return "local:made";
}

1;
