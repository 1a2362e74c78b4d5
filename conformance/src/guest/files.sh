#!/bin/busybox sh
bb=/bin/busybox
$bb mkdir -p /proc /sys /dev /mnt /tmp
$bb mount -t proc proc /proc
$bb mount -t sysfs sysfs /sys
$bb mount -t devtmpfs devtmpfs /dev
$bb mount -t tmpfs tmpfs /tmp
end() { echo "$1"; $bb sync; $bb stty -echo; $bb sleep 1; $bb poweroff -f; $bb sleep 60; }
try() { "$@" || end "GUEST-FAILED: $*"; }
for m in $($bb cat /modules/order); do try $bb insmod /modules/$m; done
n=0
while [ ! -b /dev/vda ]; do $bb sleep 0.1; n=$((n+1)); [ $n -gt 600 ] && end "GUEST-FAILED: no disk"; done
try /sbin/mkfs.ext4 -q -F -E nodiscard /dev/vda
try $bb mount -t ext4 /dev/vda /mnt
i=0
while [ $i -lt 12 ]; do
  try $bb dd if=/dev/urandom of=/mnt/big$i bs=64k count=$((4+i*3)) 2>/dev/null
  try $bb dd if=/dev/urandom of=/mnt/small$i bs=777 count=$((1+i)) 2>/dev/null
  i=$((i+1))
done
cd /mnt && $bb md5sum big* small* > /tmp/sums; cd /
try $bb sync
try $bb umount /mnt
for pass in 1 2; do
  echo 3 > /proc/sys/vm/drop_caches
  try $bb mount -t ext4 /dev/vda /mnt
  cd /mnt; $bb md5sum -s -c /tmp/sums || end "GUEST-FAILED: hashes in pass $pass"; cd /
  try $bb rm /mnt/big$pass
  $bb grep -v big$pass /tmp/sums > /tmp/fewer; $bb mv /tmp/fewer /tmp/sums
  try $bb dd if=/tmp/sums of=/mnt/overwritten conv=fsync 2>/dev/null
  try $bb fstrim /mnt
  try $bb umount /mnt
done
try /sbin/e2fsck -fn /dev/vda
end GUEST-FOUND-EVERYTHING
