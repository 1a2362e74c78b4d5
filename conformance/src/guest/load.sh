#!/bin/busybox sh
# Runs the load until the console receives a line. The load then reads and checks the whole disk.
# The test ends the VM.
bb=/bin/busybox
$bb mkdir -p /proc /sys /dev
$bb mount -t proc proc /proc
$bb mount -t sysfs sysfs /sys
$bb mount -t devtmpfs devtmpfs /dev
end() { $bb dmesg | $bb grep -i -e 'i/o error' -e 'timeout' -e 'blocked for' && echo GUEST-HAS-ERRORS; echo "$1"; $bb sleep 60; $bb poweroff -f; $bb sleep 60; }
for m in $($bb cat /modules/order); do $bb insmod /modules/$m || end "GUEST-FAILED: $m"; done
n=0
while [ ! -b /dev/vda ]; do $bb sleep 0.1; n=$((n+1)); [ $n -gt 600 ] && end "GUEST-FAILED: no disk"; done
/bin/guest-load /dev/vda HOT || end "GUEST-FAILED: the load"
end GUEST-FOUND-EVERYTHING
