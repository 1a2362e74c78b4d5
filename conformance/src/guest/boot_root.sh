#!/bin/busybox sh
# Waits for the disk, and continues with the init program of the disk's file system.
bb=/bin/busybox
$bb mkdir -p /proc /sys /dev /disk
$bb mount -t proc proc /proc
$bb mount -t sysfs sysfs /sys
$bb mount -t devtmpfs devtmpfs /dev
end() { echo "$1"; $bb stty -echo; $bb sleep 1; $bb poweroff -f; $bb sleep 60; }
for m in $($bb cat /modules/order); do $bb insmod /modules/$m || end "GUEST-FAILED: $m"; done
n=0
while [ ! -b /dev/vda ]; do $bb sleep 0.1; n=$((n+1)); [ $n -gt 600 ] && end "GUEST-FAILED: no disk"; done
$bb mount -t ext4 /dev/vda /disk || end "GUEST-FAILED: no root file system"
for m in proc sys dev; do $bb mount --move /$m /disk/$m; done
exec $bb switch_root /disk /sbin/init
