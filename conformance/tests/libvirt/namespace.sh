# shellcheck shell=sh
# Functions that the scripts of these tests share. The scripts run as root in their own mount and
# PID namespaces. Their first argument is the directory of the test.
PATH=$PATH:/usr/sbin:/sbin
export LC_ALL=C
cd "$1"

await() {
    for _ in $(seq 2400); do
        "$@" >/dev/null 2>&1 && return
        sleep 0.1
    done
    echo "in vain: $*" >&2
    tail -n 5 ./*.log >&2
    exit 1
}

# Creates directories for libvirt and hob that exist only in this namespace, and configures QEMU's
# driver. QEMU runs as the user $qemu_user with the group $qemu_group, or as root. libvirt cannot
# remember the owners of files, because not every file system has the attributes for that.
own_directories() {
    mount --make-rprivate /
    for path in /run/hob /run/libvirt /etc/libvirt /var/lib/libvirt /var/log/libvirt /var/cache/libvirt; do
        mkdir -p "$path"
        mount -t tmpfs tmpfs "$path"
    done
    cat >/etc/libvirt/qemu.conf <<X
user = "${qemu_user:-root}"
group = "${qemu_group:-root}"
security_driver = "none"
cgroup_controllers = [ ]
namespaces = [ ]
remember_owner = 0
stdio_handler = "file"
X
}
