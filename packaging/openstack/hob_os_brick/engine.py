"""The cache engine: a loop device on hob's file (FUSE) for each cached volume.

The engine keeps no state of its own. hob's disk has the path of the volume, and the loop device has
the path of hob's file. Caches are write-through, so the volume always has all acknowledged writes.
"""

import hashlib
import json
import os
import re
import time

from os_brick import caches
from os_brick import exception
from os_brick import executor
from oslo_concurrency import processutils
from oslo_log import log as logging

from hob_os_brick import settings

LOG = logging.getLogger(__name__)

# Prefix of the names of hob's disks.
PREFIX = "brick-"
# Maximum length of a disk's name in hob.
NAME_CHARS_MAX = 64
# Number of hexadecimal digits in a shortened name.
HASH_CHARS = 12
# Maximum time for the kernel to release a detached loop device.
RELEASE_SECONDS_MAX = 10
RETRY_SECONDS = 0.2
# Sector size of loop devices unless another one is requested.
SECTOR_BYTES_DEFAULT = 512


def disk_name(volume):
    """Returns the name of hob's disk for a volume's identifier or device path."""
    name = PREFIX + re.sub(r"[^A-Za-z0-9._-]", "-", os.path.basename(volume))
    if len(name) <= NAME_CHARS_MAX:
        return name
    digest = hashlib.sha256(volume.encode()).hexdigest()[:HASH_CHARS]
    return f"{name[:NAME_CHARS_MAX - HASH_CHARS - 1]}-{digest}"


class HobEngine(executor.Executor, caches.CacheEngineBase):
    """Caches volumes with hob. See os_brick.caches.CacheEngineBase.

    :param hob_config: path of the settings; /etc/hob/os-brick.conf if absent
    :param hob_volume: identifier of the volume. Device paths such as /dev/sdb are reused; with an
        identifier, the engine finds the cache of a volume whatever its path is
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._settings = settings.load(kwargs.get("hob_config") or settings.CONFIG_PATH)
        self._volume = kwargs.get("hob_volume")

    def is_engine_ready(self, **kwargs):
        """Returns true if hob's daemon answers."""
        try:
            self._disks()
        except processutils.ProcessExecutionError as error:
            LOG.error("hob does not answer: %s", error.stderr or error)
            return False
        return True

    def attach_volume(self, **kwargs):
        """Starts a cache for a volume.

        :param dev_path: block device of the volume
        :returns: path of the block device with the cache
        :raises VolumePathsNotFound: dev_path is missing
        :raises BrickException: the device has no cache, and nothing was changed
        """
        path = self._dev_path(kwargs)
        name = disk_name(self._volume or path)
        file = os.path.join(self._settings.directory, f"{name}.raw")
        disk = self._disk(name)
        if disk:
            loops = self._loops(file)
            if loops and os.path.realpath(disk["backing"]) == os.path.realpath(path):
                return loops[0]
            if loops:
                raise exception.BrickException(
                    f"{name} is the cache of {disk['backing']}, which {loops[0]} uses")
            # A disk without a loop device remains after a restart of the host.
            self._remove(name)
        try:
            self._hob("disk", "add", name, "--backing", path, "--format", "raw", "--fuse", file)
            size = ["--size", self._settings.size] if self._settings.size else []
            self._hob("cache", "enable", name, "--pool", self._settings.pool, *size,
                      "--mode", "write-through")
            return self._add_loop(path, file)
        except processutils.ProcessExecutionError as error:
            self._undo(name, file)
            raise exception.BrickException(
                f"hob does not cache {path}: {(error.stderr or str(error)).strip()}") from error

    def detach_volume(self, **kwargs):
        """Ends the cache of a volume.

        :param dev_path: block device with the cache, or the volume's block device
        :returns: path of the volume's block device; dev_path if hob does not cache it
        :raises VolumePathsNotFound: dev_path is missing
        :raises BrickException: the device is in use, and the volume still has its cache; or the
            device has lost hob's file, and its volume is unknown
        """
        path = self._dev_path(kwargs)
        disk, dead = self._find(path), self._dead_loops(path)
        if disk is None and dead:
            raise exception.BrickException(
                f"{path} has lost hob's file, and hob does not know its volume; "
                f"'losetup --detach {path}' removes it")
        if disk is None:
            LOG.warning("hob does not cache %s", path)
            return path
        for loop in [*self._loops(disk["fuse"]), *dead]:
            self._run("losetup", "--detach", loop)
        self._remove(disk["name"])
        return disk["backing"]

    def extend_volume(self, **kwargs):
        """Makes the device with the cache as large as the volume, which has grown.

        :param dev_path: block device with the cache, or the volume's block device
        :returns: size in bytes, or None if hob does not cache the volume
        """
        disk = self._find(self._dev_path(kwargs))
        if disk is None:
            return None
        self._hob("disk", "resize", disk["name"])
        loops = self._loops(disk["fuse"])
        for loop in loops:
            self._run("losetup", "--set-capacity", loop)
        return self._disk(disk["name"])["size"]

    @staticmethod
    def _dev_path(kwargs):
        path = kwargs.get("dev_path")
        if not path:
            raise exception.VolumePathsNotFound()
        return path

    def _run(self, *command):
        out, _ = self._execute(*command, run_as_root=True, root_helper=self._root_helper)
        return out

    def _hob(self, *arguments):
        return self._run(self._settings.program, "--control", self._settings.control, *arguments)

    def _disks(self):
        return json.loads(self._hob("disk", "list", "-o", "json"))

    def _disk(self, name):
        return next((disk for disk in self._disks() if disk["name"] == name), None)

    def _find(self, path):
        """Returns the engine's disk of a loop device or of a volume."""
        if self._volume:
            return self._disk(disk_name(self._volume))
        device = os.path.realpath(path)
        ours = [disk for disk in self._disks() if disk["name"].startswith(PREFIX) and disk.get("fuse")]
        for disk in ours:
            is_volume = disk["backing"] == path or os.path.realpath(disk["backing"]) == device
            if is_volume or device in self._loops(disk["fuse"]):
                return disk
        return None

    def _loops(self, file):
        """Returns the loop devices on a file."""
        out = self._run("losetup", "--list", "--noheadings", "--output", "NAME", "--associated", file)
        return out.split()

    def _dead_loops(self, path):
        """Returns the device at path if it is a loop device that has lost its file.

        When hob's daemon is killed, its files end, and loop devices on them fail all requests. The
        new daemon mounts other files in their place. The kernel shows an ended file as "/".
        """
        device = os.path.realpath(path)
        if not re.fullmatch(r"/dev/loop\d+", device):
            return []
        out = self._run("losetup", "--list", "--noheadings", "--output", "BACK-FILE", device)
        return [device] if out.strip() == "/" else []

    def _add_loop(self, path, file):
        """Creates a loop device with the volume's sector size."""
        sector = int(self._run("blockdev", "--getss", path))
        sectors = ["--sector-size", str(sector)] if sector != SECTOR_BYTES_DEFAULT else []
        out = self._run("losetup", "--find", "--show", "--direct-io=on", *sectors, file)
        return out.strip()

    def _remove(self, name):
        """Removes a disk of hob. The kernel may still be closing the file."""
        deadline = time.monotonic() + RELEASE_SECONDS_MAX
        while True:
            try:
                self._hob("disk", "remove", name)
                return
            except processutils.ProcessExecutionError as error:
                if time.monotonic() > deadline:
                    raise exception.BrickException(
                        f"hob cannot remove {name}: {(error.stderr or str(error)).strip()}") from error
            time.sleep(RETRY_SECONDS)

    def _undo(self, name, file):
        """Removes everything that an attachment has created."""
        try:
            for loop in self._loops(file):
                self._run("losetup", "--detach", loop)
            if self._disk(name):
                self._remove(name)
        except (processutils.ProcessExecutionError, exception.BrickException) as error:
            LOG.error("cannot remove hob's disk %s: %s", name, error)
