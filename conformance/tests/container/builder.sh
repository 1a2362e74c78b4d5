#!/bin/sh
# Builds the last stage of the recipe as an unprivileged user, and runs hob in the image. The binary of the
# test replaces the stage that compiles hob. host.sh runs this script in the directory of the test.
set -eux
base=$(buildah from scratch)
buildah add --quiet "$base" base.tar /
buildah commit --quiet "$base" docker.io/library/debian:bookworm-slim
buildah rm "$base"

buildah build --quiet --format docker --pull=never --build-context build=binary \
    -f context/packaging/Containerfile -t hob context
buildah inspect --type image --format '{{.Docker.Config.User}} {{.Docker.Config.Healthcheck.Test}}' hob

container=$(buildah from --pull=never hob)
in_image() { buildah run "$container" "$@"; }
in_image stat --format 'directory %n of %U:%G, mode %a' /var/lib/hob /run/hob
in_image hob daemon --config /etc/hob/hob.toml --check
# There is no such disk. A binary without the optional feature says so.
in_image timeout 10 hob serve --disk 'nbds://user@127.0.0.1:1/x?tls-psk-file=/none' \
    --listen unix:/run/hob/none.sock || true
# The daemon ends with this container's process, and is stopped as an engine stops it.
in_image sh -ec '
    hob daemon --config /etc/hob/hob.toml &
    until hob health; do sleep 0.2; done
    kill -TERM $!
    wait $!
'
echo "the daemon of the image has ended cleanly"
