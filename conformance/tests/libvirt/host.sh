# shellcheck shell=sh
# Starts a libvirt and a hob of the test's own. The scripts that source this file run as root in mount and
# PID namespaces of their own. Their first argument is the directory of the test, with hob.toml.
. "$(dirname "$0")/namespace.sh"

own_directories

start_daemon() {
    hob daemon --config hob.toml >>hob.log 2>&1 &
    daemon=$!
    await hob pool list
}

# The command waits only a short time for a slow VM, so callers repeat it.
is_listed() { hob attach --list --records records | grep "$1"; }
definition() { virsh -q dumpxml --inactive --security-info web; }
has_hobs_disk() { definition | grep "<source protocol='nbd' name='web-virtio-disk0'"; }

libvirtd --pid-file "$PWD/libvirtd.pid" >libvirtd.log 2>&1 &
await virsh -q version
start_daemon
hob pool create flash "$1/flash" --size 128M
