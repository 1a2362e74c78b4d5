#!/bin/sh
# The first process of a guest whose root is the disk. Each round runs fio, which verifies the data
# that it wrote. The jobs are in /jobs.
bb=/bin/busybox
$bb mount -t tmpfs tmpfs /tmp
end() {
  $bb dmesg | $bb grep -i -e 'i/o error' -e 'ext4-fs error' -e 'timeout' -e 'blocked for' && echo GUEST-HAS-ERRORS
  $bb sync
  $bb mount -o remount,ro / || echo GUEST-HAS-ERRORS on leaving
  echo "$1"; $bb stty -echo; $bb sleep 1; $bb poweroff -f; $bb sleep 60
}
echo "GUEST-ROOT $($bb grep ' / ' /proc/mounts | $bb tail -n 1 | $bb cut -d ' ' -f 1,3)"
round=0
while [ $round -lt ROUNDS ]; do
  # The files of the previous round are removed and trimmed, so that new files use their blocks.
  $bb rm -f /data/*
  $bb fstrim / || end "GUEST-FAILED: fstrim"
  /bin/fio --eta=never --output=/tmp/fio.log /jobs/verify.fio || { $bb cat /tmp/fio.log; end "GUEST-FAILED: fio in round $round"; }
  $bb grep -q 'err= 0' /tmp/fio.log || { $bb cat /tmp/fio.log; end "GUEST-FAILED: fio says nothing of its end"; }
  echo "GUEST-ROUND $round $($bb grep -c 'err= 0' /tmp/fio.log) jobs"
  round=$((round+1))
done
end GUEST-FOUND-EVERYTHING
