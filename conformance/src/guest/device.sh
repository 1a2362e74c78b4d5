#!/bin/busybox sh
# hob runs in the guest, and the guest's kernel has the disk as a block device. A load writes files and
# checks them, while hob is killed, stopped, replaced, and the disk grows.
bb=/bin/busybox
export PATH=/bin:/sbin
$bb mkdir -p /proc /sys /dev /mnt /tmp /data /state /run/hob
$bb mount -t proc proc /proc
$bb mount -t sysfs sysfs /sys
$bb mount -t devtmpfs devtmpfs /dev
$bb mkdir -p /dev/shm
$bb mount -t tmpfs tmpfs /dev/shm
$bb mount -t tmpfs tmpfs /tmp
end() {
  [ "$1" = GUEST-FOUND-EVERYTHING ] || { $bb tail -n 60 /tmp/hob.log; $bb dmesg | $bb tail -n 60; }
  echo "$1"; $bb sync; $bb stty -echo; $bb sleep 1; $bb poweroff -f; $bb sleep 60
}
try() { "$@" > /tmp/said 2>&1 || { $bb cat /tmp/said; end "GUEST-FAILED: $*"; }; }
# The command must fail, with this text.
refused() {
  text=$1; shift
  "$@" > /tmp/said 2>&1 && end "GUEST-FAILED: not refused: $*"
  $bb grep -q "$text" /tmp/said || { $bb cat /tmp/said; end "GUEST-FAILED: $*: no '$text'"; }
}
errors() { $bb dmesg | $bb grep -c -i 'i/o error'; }
upgrades() { $bb grep -c 'took over\|taking over' /tmp/hob.log; }
sectors() { $bb cat /sys/class/block/nbd0/size; }
for m in $($bb cat /modules/order); do try $bb insmod /modules/$m; done
n=0
while [ ! -b /dev/vdb ]; do $bb sleep 0.1; n=$((n+1)); [ $n -gt 600 ] && end "GUEST-FAILED: no disk"; done
try /sbin/mkfs.ext4 -q -F -E nodiscard /dev/vda
try $bb mount -t ext4 /dev/vda /data
try $bb truncate -s 96M /data/web.img
$bb cat > /etc/hob.toml <<END
state_dir = "/state"
listen = ["unix:/run/hob/nbd.sock"]
[control]
listen = ["unix:/run/hob/control.sock"]
END
socket() { $bb stat -c %i /run/hob/control.sock 2>/dev/null; }
start() { old=$(socket); hob daemon --config /etc/hob.toml >> /tmp/hob.log 2>&1 & pid=$!; }
# A command of hob needs processor time that the daemon needs for its start, so no command runs before
# the daemon has created its socket. A killed daemon leaves an old one.
ready() {
  n=0
  until new=$(socket) && [ "$new" != "$old" ]; do
    $bb sleep 0.2; n=$((n+1)); [ $n -gt 300 ] && end "GUEST-FAILED: hob has no control socket"
  done
  until hob disk list > /tmp/said 2>&1; do
    $bb sleep 0.2; n=$((n+1)); [ $n -gt 300 ] && end "GUEST-FAILED: hob does not answer"
  done
}
start; ready
try hob pool create flash /dev/vdb
# Without the driver, hob says what to do, and adds nothing.
refused 'modprobe nbd' hob disk add web --backing /data/web.img --device
refused 'web' hob disk show web
for m in $($bb cat /modules/later); do try $bb insmod /modules/$m; done
try hob disk add web --backing /data/web.img --device
try hob cache enable web --pool flash --size 48M --mode write-back
[ -b /dev/hob/web ] || end "GUEST-FAILED: no /dev/hob/web"
[ "$(sectors)" = 196608 ] || end "GUEST-FAILED: the device has $(sectors) sectors"
hob disk show web | $bb grep -q 'device  */dev/hob/web' || end "GUEST-FAILED: disk show has no device"
try /sbin/mkfs.ext4 -q -F /dev/hob/web
try $bb mount -t ext4 /dev/hob/web /mnt
echo "GUEST-STEP mounted"

load() {
  i=0
  while [ ! -e /tmp/stop ]; do
    k=$((i%16))
    $bb dd if=/dev/urandom of=/tmp/f$k bs=16k count=8 2>/dev/null
    $bb dd if=/tmp/f$k of=/mnt/f$k bs=16k conv=fsync 2>/dev/null || { echo GUEST-WRITE-FAILED; return; }
    (cd /tmp; $bb sha256sum f$k > sum$k)
    echo 1 > /proc/sys/vm/drop_caches
    j=$(((i*7)%16)); [ $j -gt $i ] && j=0
    (cd /mnt; $bb sha256sum -s -c /tmp/sum$j) || { echo GUEST-READ-SOMETHING-ELSE f$j; return; }
    # The load rests before it counts a round: a daemon that is killed after a round has requests of
    # the next round.
    $bb sleep 0.2
    i=$((i+1)); echo $i > /tmp/count
  done
  echo ended > /tmp/ended
}
# Sets `now` to the number of the load's rounds, unless the load is writing it, and `up` to the seconds
# since the boot. An emulated guest needs much less time for commands of the shell than for programs.
look() {
  read -r rounds < /tmp/count && now=$rounds
  read -r up _ < /proc/uptime; up=${up%.*}
}
# Waits until the load has made four more rounds, and prints how long the first of them took.
advances() {
  look; from=$now; t=$up; first=
  while :; do
    look; s=$((up-t))
    [ -z "$first" ] && [ $now -gt $from ] && first=$s
    [ $now -ge $((from+4)) ] && break
    [ $s -gt 180 ] && end "GUEST-FAILED: the load does not continue after $1"
    $bb sleep 0.2
  done
  echo "GUEST-STEP $1: the first round took $first s"
}
now=0
echo $now > /tmp/count
load &
advances 'start'
for round in 1 2; do
  kill -9 $pid; wait $pid
  start; ready
  advances 'kill -9'
done
for round in 1 2; do
  before=$(upgrades)
  kill -HUP $pid
  n=0
  until [ "$(upgrades)" -gt "$before" ]; do
    $bb sleep 0.2; n=$((n+1)); [ $n -gt 300 ] && end "GUEST-FAILED: no upgrade in the log"
  done
  $bb sleep 1
  ready
  advances 'SIGHUP'
done
[ "$(upgrades)" -ge 2 ] || end "GUEST-FAILED: no upgrade in the log"
kill $pid; wait $pid
$bb sleep 2
start; ready
advances 'a restart'

refused 'in use' hob disk remove web --yes
refused 'in use' hob disk set web --device off
try hob disk resize web --size 160M
[ "$(sectors)" = 327680 ] || end "GUEST-FAILED: the device has $(sectors) sectors after it grew"
try /sbin/resize2fs /dev/hob/web
blocks=$($bb df -k /mnt | $bb tail -n 1 | $bb awk '{print $2}')
[ "$blocks" -gt 120000 ] || end "GUEST-FAILED: the file system has $blocks KiB"
try $bb dd if=/dev/zero of=/mnt/large bs=1M count=100 conv=fsync
try $bb rm /mnt/large
advances 'growth'
# After a kill, the daemon finds the larger device.
kill -9 $pid; wait $pid
start; ready
advances 'kill -9 after growth'
hob health > /tmp/said 2>&1; $bb grep -q host-device /tmp/said && { $bb cat /tmp/said; end "GUEST-FAILED: health"; }

: > /tmp/stop
n=0
while [ ! -e /tmp/ended ]; do $bb sleep 0.1; n=$((n+1)); [ $n -gt 300 ] && end "GUEST-FAILED: the load does not end"; done
check() {
  echo 3 > /proc/sys/vm/drop_caches
  k=0
  while [ $k -lt 16 ]; do
    [ ! -e /tmp/sum$k ] || (cd /mnt; $bb sha256sum -s -c /tmp/sum$k) || end "GUEST-READ-SOMETHING-ELSE f$k $1"
    k=$((k+1))
  done
}
check 'at the end'
try $bb umount /mnt
try /sbin/e2fsck -fn /dev/hob/web
# The refusal names a program that has the device open. Removal writes the dirty data back.
$bb sleep 600 < /dev/hob/web & sleeper=$!
refused "process $sleeper (busybox) has it open" hob disk remove web --yes
kill $sleeper; wait $sleeper
try hob disk remove web --yes
[ -e /dev/hob/web ] && end "GUEST-FAILED: /dev/hob/web is left"
[ "$(sectors)" = 0 ] || end "GUEST-FAILED: the device is left"
try /sbin/e2fsck -fn /data/web.img
try $bb losetup /dev/loop0 /data/web.img
try $bb mount -t ext4 -o ro /dev/loop0 /mnt
check 'on the backing'
try $bb umount /mnt
try $bb losetup -d /dev/loop0
[ "$(errors)" = 0 ] || end "GUEST-FAILED: I/O errors in the kernel's log"
echo "GUEST-STEP removed"

# A device can be created and removed while the disk is online, also if the daemon that created the
# device was killed.
try hob disk add web --backing /data/web.img
[ -e /dev/hob/web ] && end "GUEST-FAILED: a device that nobody wanted"
try hob disk set web --device on
try $bb mount -t ext4 /dev/hob/web /mnt
check 'on a second device'
try $bb umount /mnt
kill -9 $pid; wait $pid
start; ready
try hob disk set web --device off
[ "$(sectors)" = 0 ] || end "GUEST-FAILED: the device is left after a kill"
try hob disk set web --device on
[ "$(errors)" = 0 ] || end "GUEST-FAILED: I/O errors in the kernel's log"
# Only --force removes a device that is in use. Its users get errors, which the console must not
# show.
$bb dmesg -n 1
$bb sleep 600 < /dev/hob/web & sleeper=$!
refused 'has it open' hob disk remove web --yes
try hob disk remove web --yes --force
[ -e /dev/hob/web ] && end "GUEST-FAILED: /dev/hob/web is left after --force"
$bb dd if=/dev/nbd0 of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null && end "GUEST-FAILED: the device still works"
# The kernel frees the device when its last user has closed it.
refused 'has it open' hob disk add web --backing /data/web.img --device
kill $sleeper; wait $sleeper
[ "$(sectors)" = 0 ] || end "GUEST-FAILED: the device is left after --force"
kill $pid; wait $pid
end GUEST-FOUND-EVERYTHING
