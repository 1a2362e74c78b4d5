#!/bin/sh
# Makes a base image from Debian packages, and builds the container image as an unprivileged user. The
# script runs as root in mount and PID namespaces of its own. Its arguments are the directory of the test,
# the root of the sources, and an archive for the base image. container.rs runs this script.
set -eux
cd "$1"
# shellcheck source=/dev/null
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
if [ ! -e "$3" ]; then
    mmdebstrap --quiet --variant=minbase "$suite" "$3.new.tar"
    mv "$3.new.tar" "$3"
fi
cp "$3" base.tar

mkdir context context/packaging etc home run
cp "$2"/packaging/Containerfile "$2"/packaging/hob.toml context/packaging/
cp "$2"/LICENSE-APACHE "$2"/LICENSE-MIT context/
# The user may be unable to read the sources.
cp "$(dirname "$0")/builder.sh" .

# The user exists only in this mount namespace.
mount --make-rprivate /
for file in passwd group subuid subgid; do
    touch "/etc/$file"
    cp "/etc/$file" etc/
done
echo "builder:x:64123:64123::$PWD/home:/bin/sh" >>etc/passwd
echo "builder:x:64123:" >>etc/group
echo "builder:2000000:65536" | tee -a etc/subuid >>etc/subgid
for file in passwd group subuid subgid; do
    mount --bind "etc/$file" "/etc/$file"
done
chown -R 64123:64123 .
chmod 755 .
exec setpriv --reuid 64123 --regid 64123 --clear-groups \
    env HOME="$PWD/home" XDG_RUNTIME_DIR="$PWD/run" BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs \
    sh builder.sh
