#!/bin/sh
# Starts a cloud-hypervisor VM with a disk of hob: hob disk add web --vhost-user /run/hob/web.sock …
exec cloud-hypervisor \
    --kernel /srv/vmlinux --cmdline 'console=hvc0 root=/dev/vda rw' \
    --cpus boot=4 --memory size=4G,shared=on \
    --disk vhost_user=on,socket=/run/hob/web.sock,num_queues=4,queue_size=128
