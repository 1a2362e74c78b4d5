#!/bin/sh
# The first process of the guest. It builds the caches that /plan lists, plays /trace to all of
# them, and prints counters on the serial console. The lines are parsed by linux/console.rs.
#
# A line of /plan: KIND NAME SECTORS PARAMETER. SECTORS is the size of the cache in units of 512
# bytes. PARAMETER is the block size of dm-cache in such units, or the bucket size of bcache in
# bytes. /span has the size of the disks in sectors, /ramdisks the number of RAM disks.
export PATH=/bin DM_DISABLE_UDEV=1
mount -t devtmpfs none /dev
mount -t proc none /proc
mount -t sysfs none /sys

trouble() { echo "trouble $*"; return 1; }

while read -r module; do
    case $module in
        brd.ko) options="rd_nr=$(cat /ramdisks) rd_size=268435456" ;;
        *) options= ;;
    esac
    # $options is unquoted, because there can be several options or none.
    # shellcheck disable=SC2086
    insmod "/modules/$module" $options || trouble "$module: cannot load"
done </modules/order

span=$(cat /span)
ram_used=0
devices=

# Creates a device-mapper device from a table on standard input.
create() { dmsetup create --noudevsync --noudevrules "$1" || trouble "$1: cannot create"; }

# Creates a device that keeps its data. A RAM disk uses memory only for blocks that were written.
create_ram() { echo "0 $2 linear /dev/ram$ram_used 0" | create "$1"; ram_used=$((ram_used + 1)); }

# Creates a device that does not keep its data: all reads return zeros.
create_zero() { echo "0 $2 zero" | create "$1"; }

block_name() { echo "dm-$(dmsetup info -c --noheadings -o minor "$1")"; }
stat_file() { echo "/sys/block/$(block_name "$1")/stat"; }
# The numbers of a stat file are: reads, merged, sectors read, ms, writes, merged, sectors written.
written() { awk '{ print $7 }' "$(stat_file "$1")"; }

add_dm_cache() { # NAME SECTORS BLOCK
    create_ram "$1.meta" 131072 && create_zero "$1.fast" "$2" && create_zero "$1.disk" "$span" &&
        echo "0 $span flakey /dev/mapper/$1.disk 0 0 1000000 5 corrupt_bio_byte 1 r 255 0" |
        create "$1.slow" &&
        echo "0 $span cache /dev/mapper/$1.meta /dev/mapper/$1.fast /dev/mapper/$1.slow $3" \
            "1 writethrough smq 0" | create "$1" || return
    devices="$devices $1:/dev/mapper/$1:-"
}

add_dm_writecache() { # NAME SECTORS
    create_ram "$1.fast" "$2" && create_zero "$1.slow" "$span" &&
        echo "0 $span writecache s /dev/mapper/$1.slow /dev/mapper/$1.fast 4096 0" |
        create "$1" || return
    devices="$devices $1:/dev/mapper/$1:$(stat_file "$1.slow")"
}

add_bcache() { # NAME SECTORS BUCKET
    # The first MiB of the backing device keeps its data, because bcache's superblock is there.
    create_ram "$1.fast" "$2" && create_ram "$1.head" 2048 && create_zero "$1.disk" "$span" &&
        printf '0 2048 linear /dev/mapper/%s 0\n2048 %s linear /dev/mapper/%s 0\n' \
            "$1.head" "$span" "$1.disk" | create "$1.slow" || return
    make-bcache --bucket "$3" --data-offset 2048 -C "/dev/mapper/$1.fast" -B "/dev/mapper/$1.slow" \
        >/tmp/make-bcache 2>&1 || trouble "$1: $(tail -n 1 /tmp/make-bcache)" || return
    for part in fast slow; do
        echo "/dev/mapper/$1.$part" 2>/dev/null >/sys/fs/bcache/register
    done
    sleep 1
    bcache=/sys/block/$(block_name "$1.slow")/bcache
    if [ ! -e "$bcache/dev" ] || [ ! -e "$bcache/cache" ]; then
        trouble "$1: bcache refuses a cache of $(($2 / 2)) KiB: $(dmesg | grep 'bcache:.*err' | tail -n 1)"
        return
    fi
    echo 0 >"$bcache/sequential_cutoff"
    echo 0 >"$bcache/cache/congested_read_threshold_us"
    echo 0 >"$bcache/cache/congested_write_threshold_us"
    devices="$devices $1:/dev/$(basename "$(readlink -f "$bcache/dev")"):$(stat_file "$1.slow")"
}

while read -r kind name sectors parameter; do
    "add_$kind" "$name" "$sectors" "$parameter"
done </plan

# Writes during the creation of the caches are not counted.
for device in $devices; do
    name=${device%%:*}
    written "$name.fast" >"/tmp/before.$name"
done
# $devices is unquoted, because each device is an argument.
# shellcheck disable=SC2086
player /trace $devices || trouble "the player failed"
# The caches still write metadata and copy blocks in the background.
sleep 30
for device in $devices; do
    name=${device%%:*}
    metadata=
    [ -e "/dev/mapper/$name.meta" ] && metadata=" metadata_sectors=$(written "$name.meta")"
    echo "counted $name sectors=$(($(written "$name.fast") - $(cat "/tmp/before.$name")))$metadata"
done
dmesg | grep -E 'I/O error|BUG:|blocked for more' | tail -n 3 | sed 's/^/trouble kernel: /'
echo complete
sleep 1
echo b >/proc/sysrq-trigger
sleep 60
