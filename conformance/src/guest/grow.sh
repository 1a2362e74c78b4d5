#!/bin/busybox sh
# Waits until the disk grows. Then writes to the new part, and reads the new and the old part.
bb=/bin/busybox
$bb mkdir -p /proc /sys /dev /tmp
$bb mount -t proc proc /proc
$bb mount -t sysfs sysfs /sys
$bb mount -t devtmpfs devtmpfs /dev
$bb mount -t tmpfs tmpfs /tmp
end() { $bb dmesg | $bb grep -i -e 'i/o error' -e 'timeout' -e 'blocked for' && echo GUEST-HAS-ERRORS; echo "$1"; $bb stty -echo; $bb sleep 1; $bb poweroff -f; $bb sleep 60; }
for m in $($bb cat /modules/order); do $bb insmod /modules/$m || end "GUEST-FAILED: $m"; done
n=0
while [ ! -b /dev/vda ]; do $bb sleep 0.1; n=$((n+1)); [ $n -gt 600 ] && end "GUEST-FAILED: no disk"; done
before=$($bb cat /sys/block/vda/size)
$bb dd if=/dev/urandom of=/tmp/noise bs=64k count=16 2>/dev/null
$bb dd if=/tmp/noise of=/dev/vda bs=64k seek=16 oflag=direct conv=notrunc,fsync 2>/dev/null || echo GUEST-WRITE-FAILED
echo "GUEST-ROUND 0 sectors=$before"
n=0
while [ $($bb cat /sys/block/vda/size) = $before ]; do
  $bb dd if=/dev/vda of=/tmp/old bs=64k skip=16 count=16 iflag=direct 2>/dev/null || echo GUEST-READ-FAILED
  $bb cmp /tmp/noise /tmp/old || echo GUEST-READ-SOMETHING-ELSE
  n=$((n+1)); [ $n -gt 1000 ] && end "GUEST-FAILED: the disk does not grow"
  $bb sleep 0.1
done
after=$($bb cat /sys/block/vda/size)
echo "GUEST-ROUND 1 sectors=$after"
last=$((after/128-16))
$bb dd if=/tmp/noise of=/dev/vda bs=64k seek=$last oflag=direct conv=notrunc,fsync 2>/dev/null || echo GUEST-WRITE-FAILED
for at in 16 $last; do
  $bb dd if=/dev/vda of=/tmp/old bs=64k skip=$at count=16 iflag=direct 2>/dev/null || echo GUEST-READ-FAILED
  $bb cmp /tmp/noise /tmp/old || echo GUEST-READ-SOMETHING-ELSE at $at
done
echo "GUEST-PART $($bb sha256sum < /tmp/noise | $bb cut -c1-64)"
end GUEST-FOUND-EVERYTHING
