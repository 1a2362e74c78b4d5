#!/bin/sh
# Attaches and detaches the disk of a domain, as root in mount and PID namespaces of its own. QEMU runs as
# the user and group that it has on Debian. The first argument is the directory of the test, with hob.toml
# and domain.xml. libvirt.rs runs this script.
set -eux
qemu_user=libvirt-qemu qemu_group=kvm
. "$(dirname "$0")/host.sh"

device=/machine/peripheral/virtio-disk0/virtio-backend
# Writes to the disk through the guest's device.
guest_writes() { virsh -q qemu-monitor-command web --hmp "qemu-io -d $device \"write -P $1 $2 1M\""; }
attach() { hob attach libvirt:web --records records --nbd "$PWD/nbd.sock" --size 64M --preset auto; }
# libvirt gives the image of a running domain to QEMU's user.
qemu_owns_the_image() { [ "$(stat --format %U:%G image.qcow2)" = "$qemu_user:$qemu_group" ]; }

# QEMU must reach the image and hob's socket.
chmod 711 .
qemu-img create -q -f qcow2 image.qcow2 32M
virsh -q define domain.xml
definition >before.xml
virsh -q start web
uid=$(awk '$1 == "Uid:" { print $2 }' "/proc/$(cat /run/libvirt/qemu/web.pid)/status")
[ "$uid" = "$(id -u "$qemu_user")" ]
qemu_owns_the_image
guest_writes 1 0

# QEMU has no access to hob's socket. The domain keeps its image.
chmod 600 nbd.sock
if attach 2>refused.log; then exit 1; fi
grep 'Permission denied' refused.log
grep "set 'socket_group'" refused.log
chmod 660 nbd.sock
definition | cmp - before.xml
if hob disk list | grep web-virtio-disk0; then exit 1; fi

# The domain runs through hob, and again through its image.
attach
has_hobs_disk
await is_listed 'uses hob'
guest_writes 2 1M
# A domain is the same VM by its UUID.
uuid=$(virsh -q domuuid web)
if hob detach "libvirt:$uuid" no-such-disk --records records 2>uuid.log; then exit 1; fi
grep 'attached are: virtio-disk0' uuid.log
hob detach "libvirt:$uuid" --records records
definition | cmp - before.xml
qemu_owns_the_image
guest_writes 3 2M

# The record of the attachment is lost. QEMU names hob's disk, and the daemon names the image.
attach
guest_writes 8 7M
rm records/web-virtio-disk0.json
hob detach libvirt:web web-virtio-disk0 --records records
definition | cmp - before.xml
qemu_owns_the_image

# The next start uses hob's disk.
attach
virsh -q destroy web
await is_listed stopped
virsh -q start web
hob stats web-virtio-disk0
guest_writes 4 3M
# The domain was started with hob's disk, so libvirt has not given the image to QEMU's user.
if hob detach libvirt:web --records records 2>started.log; then exit 1; fi
grep "QEMU cannot open the image.*Permission denied.*'chown $uid " started.log
has_hobs_disk
attach 2>started.log
grep 'nothing to do' started.log
# The saved state of the domain needs hob's disk.
virsh -q managedsave web
await is_listed saved
if hob detach --stopped libvirt:web --records records 2>saved.log; then exit 1; fi
grep "Restore the domain with 'virsh start web'" saved.log
has_hobs_disk
virsh -q start web
virsh -q destroy web
hob detach --stopped libvirt:web --records records
definition | cmp - before.xml

# A domain that was started with hob's disk is detached while it runs.
virsh -q start web
attach
virsh -q destroy web
virsh -q start web
guest_writes 5 4M
chown "$uid" image.qcow2
hob detach libvirt:web --records records
definition | cmp - before.xml
if hob disk list | grep web-virtio-disk0; then exit 1; fi
guest_writes 6 5M
virsh -q destroy web

# The domain is deleted while its disk is attached.
virsh -q start web
attach
guest_writes 7 6M
virsh -q destroy web
virsh -q undefine web
hob detach --stopped libvirt:web --records records
if hob disk list | grep web-virtio-disk0; then exit 1; fi

qemu-img check -q image.qcow2
for number in 1 2 3 4 5 6 7 8; do
    if qemu-io -f qcow2 -c "read -P $number $((number - 1))M 1M" image.qcow2 | grep 'verification failed'; then exit 1; fi
done
