package PVE::QemuConfig;
# A stub: a VM's configuration below the directory HOB_PVE_ROOT. With PVE_STUB_FAILS, its lock cannot be taken.
use strict;
use warnings;

my sub file {
    my ($vmid) = @_;
    return "$ENV{HOB_PVE_ROOT}/etc/pve/qemu-server/$vmid.conf";
}

sub lock_config {
    my ($class, $vmid, $code) = @_;
    die "can't lock file 'lock-$vmid.conf' - got timeout\n" if $ENV{PVE_STUB_FAILS};
    return $code->();
}

# Returns the lines before the first snapshot as a hash. `rest` has the snapshots.
sub load_config {
    my ($class, $vmid) = @_;
    open(my $in, '<', file($vmid)) or die "no configuration: $!\n";
    my $text = do { local $/; <$in> };
    my ($current, $rest) = split(m/^(?=\[)/m, $text, 2);
    my $conf = { rest => $rest // '' };
    for my $line (split(m/\n/, $current)) {
        $conf->{$1} = $2 if $line =~ m/^(\w+): (.*)$/;
    }
    return $conf;
}

sub check_lock {
    my ($class, $conf) = @_;
    die "VM is locked ($conf->{lock})\n" if $conf->{lock};
}

sub write_config {
    my ($class, $vmid, $conf) = @_;
    my @keys = sort grep { $_ ne 'rest' && length($conf->{$_}) } keys %$conf;
    my $text = join('', map { "$_: $conf->{$_}\n" } @keys);
    open(my $out, '>', file($vmid)) or die "cannot write: $!\n";
    print $out "$text\n$conf->{rest}";
    close($out) or die "cannot write: $!\n";
}

1;
