#!/bin/sh
# Migrates a domain with hob's libvirt hook between two daemons of libvirt, as root in namespaces of its own. The
# arguments are the directory of the test, with domain.xml and the hosts' certificates, and the hook. libvirt.rs
# runs this script, which calls itself for each host: DIRECTORY HOOK NAME NUMBER OTHER.
set -eu
. "$(dirname "$0")/namespace.sh"
dir=$PWD hook=$2

# Starts a host: its mounts, network, libvirt and hob.
host() {
    name=$1 number=$2 other=$3
    hostname "host-$name"
    own_directories
    mkdir /etc/libvirt/hooks
    cat >/etc/libvirt/libvirtd.conf <<X
listen_tls = 0
listen_tcp = 1
auth_tcp = "none"
host_uuid = "0000000$number-1111-2222-3333-444444444444"
X
    cat >"$name.conf" <<X
PEERS='10.0.0.1:9443 10.0.0.2:9443'
SELF='10.0.0.$number:9443'
export HOB_CA=$dir/ca.pem HOB_CERT=$dir/$name.pem HOB_KEY=$dir/$name.key
MARKS=$dir/marks-$name
X
    # libvirt does not pass environment variables to its hooks.
    cat >/etc/libvirt/hooks/qemu <<X
#!/bin/sh
echo "\$*" >>$dir/hook-$name.log
export HOB_HOOK_CONFIG=$dir/$name.conf
exec $hook "\$@" 2>>$dir/hook-$name.log
X
    chmod +x /etc/libvirt/hooks/qemu
    cat >"$name.toml" <<X
state_dir = "$dir/state-$name"
listen = ["unix:/run/hob/nbd.sock"]
[control]
listen = ["unix:/run/hob/control.sock", "tcp:10.0.0.$number:9443"]
tls = { cert = "$dir/$name.pem", key = "$dir/$name.key", client_ca = "$dir/ca.pem" }
[[control.client]]
certificate = "cn:host-$name"
role = "admin"
[[control.client]]
certificate = "cn:host-$other"
role = "admin"
X
    ip link set lo up
    await ip link show "veth-$name"
    ip addr add "10.0.0.$number/24" dev "veth-$name"
    ip link set "veth-$name" up
    hob daemon --config "$name.toml" >"hob-$name.log" 2>&1 &
    libvirtd --listen --pid-file "$dir/libvirtd-$name.pid" >"libvirtd-$name.log" 2>&1 &
    await virsh -q version
    await hob pool list
    hob pool create flash "$dir/flash-$name" --size 128M
}

guest_writes() {
    device=/machine/peripheral/virtio-disk0/virtio-backend
    virsh -q qemu-monitor-command web --hmp "qemu-io -d $device \"write -P $1 $2 $3\""
}

state_of_web() { hob disk show web | awk '$1 == "state" { print $2 }'; }
is_online() { [ "$(state_of_web)" = online ]; }
is_away() { [ "$(state_of_web)" = away ]; }

source_host() {
    await test -e ready-b
    hob disk add web --backing "$dir/shared.raw"
    hob cache enable web --pool flash --size 64M --mode write-back
    virsh -q define domain.xml
    virsh -q start web
    guest_writes 7 0 8M
    virsh -q migrate --live web qemu+tcp://10.0.0.2/system --migrateuri tcp://10.0.0.2:49200
    touch migrated
    await test -e checked
    await is_away
    virsh -q domstate web | grep 'shut off'
}

destination_host() {
    touch ready-b
    await test -e migrated
    virsh -q domstate web | grep running
    # The first write makes this host the disk's host.
    guest_writes 8 8M 1M
    await is_online
    web='nbd+unix:///web?socket=/run/hob/nbd.sock'
    qemu-io -r -f raw -c 'read -P 7 0 8M' -c 'read -P 8 8M 1M' "$web" >read.log
    if grep 'verification failed' read.log; then exit 1; fi
    touch checked
    await test -e ended-a
    virsh -q destroy web
}

if [ $# -eq 2 ]; then
    truncate -s 64M shared.raw
    spaces='--mount --net --uts --pid --fork --mount-proc --kill-child'
    # shellcheck disable=SC2086
    unshare $spaces sh "$0" "$dir" "$hook" a 1 b &
    a=$!
    # shellcheck disable=SC2086
    unshare $spaces sh "$0" "$dir" "$hook" b 2 a &
    b=$!
    ip link add veth-a type veth peer name veth-b
    # The processes may still be in this network namespace.
    here=$(readlink /proc/self/ns/net)
    for process in $a $b; do
        await sh -c "[ \"\$(readlink /proc/$process/ns/net)\" != '$here' ]"
    done
    ip link set veth-a netns "$a"
    ip link set veth-b netns "$b"
    wait "$a"
    wait "$b"
    grep '^web migrate begin' hook-b.log
    if grep 'cannot' hook-a.log hook-b.log; then exit 1; fi
else
    host "$3" "$4" "$5"
    if [ "$3" = a ]; then
        source_host
        touch ended-a
    else
        destination_host
    fi
fi
