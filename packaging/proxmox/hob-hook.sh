#!/bin/sh
# hob's hook script for Proxmox VE: moves caches when a VM migrates, and reports events of VMs to hob.
#
# Put it as an executable file into the snippets of a storage that all nodes have, and set it for each VM:
#     qm set 100 --hookscript local:snippets/hob-hook.sh
# The script reads /etc/hob/hook.conf on each node, which is in shell syntax; see packaging/libvirt/hook.conf and
# docs/MIGRATION.md.
#
# Proxmox VE calls the script with the number of the VM and a phase: pre-start (a failure prevents the start),
# post-start, pre-stop, post-stop. During a migration, the destination runs the phase pre-start with
# PVE_MIGRATED_FROM set to the name of the source node, which still has the VM's configuration.
set -u

vm=${1:?number of the VM} phase=${2:?phase} from=${PVE_MIGRATED_FROM:-}

: "${HOB_HOOK_CONFIG:=/etc/hob/hook.conf}" "${PVE_DIR:=/etc/pve}"
SOCKETS=/run/hob PEERS='' SELF='' CACHE=copy BANDWIDTH='' EVENTS=yes
# shellcheck source=/dev/null
[ ! -r "$HOB_HOOK_CONFIG" ] || . "$HOB_HOOK_CONFIG"

say() { echo "hob: $vm: $*" >&2; }

# Prints the VM's configuration without its snapshots.
config() {
    for file in "$PVE_DIR/nodes/$from/qemu-server/$vm.conf" "$PVE_DIR/qemu-server/$vm.conf"; do
        [ -r "$file" ] || continue
        sed '/^\[/,$d' "$file"
        return
    done
    say "cannot find the configuration of the VM in $PVE_DIR"
    return 1
}

# Prints the VM's disks that hob serves, one per line: the name, and for a vhost-user disk the socket. These disks are
# in `args`, because Proxmox VE has no NBD or vhost-user disks.
disks() {
    config | sed -n 's/^args: *//p' | tr ' ,' '\n' | awk -v dir="$SOCKETS/" '
        { sub(/^[a-z.]*=/, "") }
        /^nbd\+unix:\/\/\// {
            name = $0; sub(/^nbd\+unix:\/\/\//, "", name); socket = name
            sub(/\?.*/, "", name); sub(/^[^?]*\?socket=/, "", socket)
            if (index(socket, dir) == 1) print name
        }
        index($0, dir) == 1 && /\.sock$/ {
            name = substr($0, length(dir) + 1); sub(/\.sock$/, "", name)
            if (name !~ /\//) print name, $0
        }'
}

# Prints the state of a disk (online, awaited, away, …), or nothing if the daemon has no such disk.
state() {
    hob disk show "$1" 2>/dev/null </dev/null | awk '$1 == "state" { print $2; exit }'
}

# Prints the address of the control API of the migration's source.
peer() {
    for one in $PEERS; do
        [ "${one%%=*}" != "$from" ] || { echo "${one#*=}"; return; }
    done
    return 1
}

# Requests a disk with its cache from the source.
fetch() {
    disk=$1 path=$2
    case $(state "$disk") in
        awaited) return 0 ;; # an operator has already run hob migrate
        online) say "$disk is online on this node, but the VM migrates from $from; check which node should own the disk"; return 1 ;;
    esac
    if ! peer=$(peer) || [ -z "$SELF" ]; then
        say "cannot request $disk: set SELF, and $from=ADDRESS in PEERS, in $HOB_HOOK_CONFIG, or run 'hob migrate $disk' on $from first"
        return 1
    fi
    set -- --to "${SELF#*=}" --cache "$CACHE" --wait awaited
    [ -z "$path" ] || set -- "$@" --vhost-user "$path"
    [ -z "$BANDWIDTH" ] || set -- "$@" --bandwidth "$BANDWIDTH"
    HOB_CONTROL="https://$peer" hob migrate "$disk" "$@" </dev/null || return 1
    begun="$begun $disk@$peer"
}

arrive() {
    config >/dev/null || return 1
    begun='' wanted=$(disks)
    while read -r disk path; do
        [ -n "$disk" ] || continue
        fetch "$disk" "$path" && continue
        for one in $begun; do
            HOB_CONTROL="https://${one#*@}" hob migrate "${one%@*}" --cancel </dev/null
        done
        return 1
    done <<EOF
$wanted
EOF
}

# Reports an event of the VM to hob, for each disk that this node owns.
tell() {
    [ "$EVENTS" = yes ] || return 0
    disks | while read -r disk _; do
        [ "$(state "$disk")" != online ] || hob disk event "$disk" "$1" </dev/null || say "cannot report the event $1 of $disk to hob"
    done
}

give_back() {
    disks | while read -r disk _; do
        [ "$(state "$disk")" != awaited ] || hob disk remove "$disk" </dev/null
    done
}

# Returns true if the VM is suspended to disk, or is being suspended.
suspended() { config | grep -Eq '^lock: *suspend'; }

case $phase in
    pre-start)
        if [ -n "$from" ]; then
            arrive || exit 1
        elif suspended; then
            tell resume
        else
            tell cold-restart
        fi
        ;;
    post-stop)
        ! suspended || tell suspend
        give_back
        ;;
esac
exit 0
