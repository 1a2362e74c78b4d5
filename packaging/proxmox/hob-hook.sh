#!/bin/sh
# hob for Proxmox VE: caches that come along when a machine migrates, and that learn what happens to it.
#
# Put it into the snippets of a storage that all nodes have, executable, and set it for each machine:
#     qm set 100 --hookscript local:snippets/hob-hook.sh
# It reads /etc/hob/hook.conf on each node, a piece of shell; see packaging/libvirt/hook.conf. docs/MIGRATION.md says the rest.
#
# Proxmox VE calls it with the number of the machine and a phase: pre-start (failing here prevents the start), post-start, pre-stop, post-stop. A machine
# that comes from another node is "started" here first, with PVE_MIGRATED_FROM set to that node's name; its configuration is still there.
set -u

machine=${1:?number of the machine} phase=${2:?phase} from=${PVE_MIGRATED_FROM:-}

: "${HOB_HOOK_CONFIG:=/etc/hob/hook.conf}" "${PVE_DIR:=/etc/pve}"
SOCKETS=/run/hob PEERS='' SELF='' CACHE=copy BANDWIDTH='' EVENTS=yes
# shellcheck source=/dev/null
[ ! -r "$HOB_HOOK_CONFIG" ] || . "$HOB_HOOK_CONFIG"

say() { echo "hob: $machine: $*" >&2; }

# The machine's configuration, without its snapshots.
config() {
    for file in "$PVE_DIR/nodes/$from/qemu-server/$machine.conf" "$PVE_DIR/qemu-server/$machine.conf"; do
        [ -r "$file" ] || continue
        sed '/^\[/,$d' "$file"
        return
    done
    say "no configuration in $PVE_DIR"
    return 1
}

# The machine's disks that hob serves, one a line: the name, and the socket if it is one for vhost-user. They stand in `args`, since
# Proxmox VE has no disks of these kinds of its own.
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

# What a disk is: online, awaited, away, …; nothing if there is none.
state() {
    hob disk show "$1" 2>/dev/null </dev/null | awk '$1 == "state" { print $2; exit }'
}

# The control address of the node that the machine comes from.
peer() {
    for one in $PEERS; do
        [ "${one%%=*}" != "$from" ] || { echo "${one#*=}"; return; }
    done
    return 1
}

# Asks for the cache of a disk.
fetch() {
    disk=$1 path=$2
    case $(state "$disk") in
        awaited) return 0 ;; # somebody has asked before: hob migrate, by hand
        online) say "$disk belongs to this node, and the machine comes from $from"; return 1 ;;
    esac
    if ! peer=$(peer) || [ -z "$SELF" ]; then
        say "nobody has said 'hob migrate $disk' at $from, and $HOB_HOOK_CONFIG has no SELF, or no $from=ADDRESS in PEERS"
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

# Tells of each disk that is at home here.
tell() {
    [ "$EVENTS" = yes ] || return 0
    disks | while read -r disk _; do
        [ "$(state "$disk")" != online ] || hob disk event "$disk" "$1" </dev/null || say "$disk was not told of: $1"
    done
}

give_back() {
    disks | while read -r disk _; do
        [ "$(state "$disk")" != awaited ] || hob disk remove "$disk" </dev/null
    done
}

# Whether the machine is, or is being, suspended to disk.
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
