#!/bin/sh
# Runs the commands of docs/QUICKSTART_LIBVIRT.md, from the installation of the Debian package to a cached domain,
# as root in mount and PID namespaces of its own. The arguments are the directory of the test, with domain.xml and
# the file 'commands', and the package. attach_quick_start.rs runs this script.
set -eu
# shellcheck disable=SC2034
qemu_user=libvirt-qemu qemu_group=kvm
package=$2
. "$(dirname "$0")/namespace.sh"

# The package is installed over the host's files, in this namespace only.
mount --make-rprivate /
mkdir layers
mount -t tmpfs tmpfs layers
for path in /etc /usr /var/cache /var/lib /var/log; do
    upper=$PWD/layers$path/upper work=$PWD/layers$path/work
    mkdir -p "$upper" "$work"
    mount -t overlay overlay -o "lowerdir=$path,upperdir=$upper,workdir=$work" "$path"
done
# The package must not reload the host's systemd.
if [ -d /run/systemd ]; then mount -t tmpfs tmpfs /run/systemd; fi
own_directories

libvirtd --pid-file "$PWD/libvirtd.pid" >libvirtd.log 2>&1 &
await virsh -q version
definition() { virsh -q dumpxml --inactive --security-info web; }
is_cached() { hob attach --list | grep 'uses hob'; }
seconds() { cut -d. -f1 /proc/uptime; }

# The domain of a user who has no hob. QEMU must reach the image.
chmod 711 .
qemu-img create -q -f qcow2 image.qcow2 32M
virsh -q define domain.xml
definition >before.xml
virsh -q start web

# The programs of the page that need systemd or a network.
apt() { DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install "$package"; }
systemctl() {
    program=$(sed -n 's/^ExecStart=//p' /usr/lib/systemd/system/hob.service)
    $program >hob.log 2>&1 &
    await hob pool list
}

begin=$(seconds)
while read -r line; do
    echo "# $line"
    eval "$line" </dev/null
    if [ "$line" = 'hob attach --list' ]; then
        await is_cached
        echo "cached after $(($(seconds) - begin)) s"
        definition | grep -q "<source protocol='nbd' name='web-virtio-disk0'"
        device=/machine/peripheral/virtio-disk0/virtio-backend
        virsh -q qemu-monitor-command web --hmp "qemu-io -d $device \"write -P 1 0 1M\""
    fi
done <commands

# The last command has detached the disk.
definition | cmp - before.xml
if hob disk list | grep web-virtio-disk0; then exit 1; fi
virsh -q destroy web
qemu-img check -q image.qcow2
if qemu-io -f qcow2 -c 'read -P 1 0 1M' image.qcow2 | grep 'verification failed'; then exit 1; fi
[ -f /etc/apparmor.d/abstractions/libvirt-qemu.d/hob ]
