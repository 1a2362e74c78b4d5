#!/bin/busybox sh
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
echo "GUEST-SEES serial=$($bb cat /sys/block/vda/serial) sectors=$($bb cat /sys/block/vda/size) queues=$($bb ls /sys/block/vda/mq | $bb wc -l) block=$($bb cat /sys/block/vda/queue/logical_block_size)/$($bb cat /sys/block/vda/queue/physical_block_size) discard=$($bb cat /sys/block/vda/queue/discard_max_bytes) cache=$($bb cat /sys/block/vda/queue/write_cache | $bb tr ' ' -)"
i=0
while [ $i -lt 4 ]; do $bb dd if=/dev/urandom of=/tmp/new$i bs=4k count=512 2>/dev/null; i=$((i+1)); done
part() {
  $bb dd if=/tmp/new$1 of=/dev/vda bs=64k seek=$(($1*512)) oflag=direct conv=notrunc,fsync 2>/dev/null || echo GUEST-WRITE-FAILED
  $bb dd if=/dev/vda of=/tmp/old$1 bs=64k skip=$(($1*512)) count=32 iflag=direct 2>/dev/null || echo GUEST-READ-FAILED
  $bb cmp /tmp/new$1 /tmp/old$1 || echo GUEST-READ-SOMETHING-ELSE
}
round=0
while [ $round -lt ROUNDS ]; do
  for i in 0 1 2 3; do part $i & done
  # A read of another place on the disk fills the page cache. The data must not change later.
  $bb dd if=/dev/vda of=/dev/null bs=1M skip=$((128+round)) count=1 2>/dev/null
  wait
  echo "GUEST-ROUND $round"
  # In the next round each part gets the data of another part. The data of part 3 changes first.
  $bb mv /tmp/new0 /tmp/spare; $bb mv /tmp/new1 /tmp/new0; $bb mv /tmp/new2 /tmp/new1; $bb mv /tmp/new3 /tmp/new2; $bb mv /tmp/spare /tmp/new3
  echo $round | $bb dd of=/tmp/new3 conv=notrunc 2>/dev/null
  round=$((round+1))
done
kept=$($bb dd if=/dev/vda bs=1M skip=128 count=$round 2>/dev/null | $bb md5sum)
there=$($bb dd if=/dev/vda bs=1M skip=128 count=$round iflag=direct 2>/dev/null | $bb md5sum)
[ "$kept" = "$there" ] || echo GUEST-READ-SOMETHING-ELSE into its page cache
i=0
while [ $i -lt 4 ]; do echo "GUEST-PART $i $($bb sha256sum < /tmp/old$i | $bb cut -c1-64)"; i=$((i+1)); done
end GUEST-FOUND-EVERYTHING
