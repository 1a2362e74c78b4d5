"""Tests of the cache engine with os-brick, a hob daemon and loop devices. They need root.

Environment: HOB_OS_BRICK_CONF, the settings of the engine; VOLUME, a file of 16 MiB that each test
uses as its volume.
"""

import os
import pathlib
import subprocess
import unittest
from unittest import mock

from os_brick import caches
from os_brick import exception
from os_brick import privileged
from oslo_privsep import priv_context

import hob_os_brick
from hob_os_brick import engine
from hob_os_brick import settings

CONFIG = os.environ["HOB_OS_BRICK_CONF"]
VOLUME = pathlib.Path(os.environ["VOLUME"])
SIZE = 16 << 20
PATTERN = bytes(range(256)) * 16


def setUpModule():
    """Starts os-brick's process for commands as root, with its usual capabilities."""
    privileged.default.start(priv_context.Method.FORK)
    hob_os_brick.register()


def tearDownModule():
    privileged.default.stop()


def run(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def write(device, offset, data):
    with open(device, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), data, offset)
        os.fsync(file.fileno())


class EngineTest(unittest.TestCase):
    def setUp(self):
        VOLUME.write_bytes(b"v" * SIZE)
        self.volume = self.loop()

    def loop(self):
        device = run("losetup", "--find", "--show", str(VOLUME))
        self.addCleanup(run, "losetup", "--detach", device)
        return device

    def manager(self, path=None, cacheable=True, config=CONFIG, **more):
        data = {"device_path": path or self.volume, "cacheable": cacheable}
        return caches.CacheManager(
            root_helper="sudo", connection_info={"data": data}, cache_name="hob",
            hob_config=config, **more)

    def attach(self, **more):
        device = self.manager(**more).attach_volume()
        self.addCleanup(self.detach_quietly, device)
        return device

    def detach_quietly(self, device):
        if self.file_of(device):
            self.manager(path=device).detach_volume()

    def file_of(self, device):
        """Returns the file of a loop device, or "" if it has none."""
        return run("losetup", "--list", "--noheadings", "--output", "BACK-FILE", device)

    def engine(self, **more):
        return engine.HobEngine(root_helper="sudo", hob_config=CONFIG, **more)

    def disks(self):
        return self.engine()._disks()

    def changed(self, **keys):
        """Returns the path of settings with other values."""
        current = settings.load(CONFIG)
        path = VOLUME.with_name("changed.conf")
        values = {"pool": current.pool, "control": current.control, "directory": current.directory,
                  "program": current.program, **keys}
        path.write_text("[hob]\n" + "".join(f"{key} = {value}\n" for key, value in values.items()))
        return str(path)

    def test_the_guest_reads_and_writes_the_volume_through_the_cache(self):
        device = self.attach()
        self.assertNotEqual(device, self.volume)
        self.assertEqual(int(run("blockdev", "--getsize64", device)), SIZE)
        with open(device, "rb") as file:
            self.assertEqual(file.read(4096), b"v" * 4096)
        write(device, 1 << 20, PATTERN)
        [disk] = self.disks()
        self.assertEqual(disk["cache"]["mode"], "write-through")
        self.assertEqual(disk["backing"], self.volume)
        self.assertEqual(VOLUME.read_bytes()[1 << 20:(1 << 20) + len(PATTERN)], PATTERN)
        self.assertEqual(self.manager(path=device).detach_volume(), self.volume)
        self.assertEqual(self.disks(), [])
        self.assertNotEqual(self.file_of(device), disk["fuse"])

    def test_attaching_again_returns_the_same_device(self):
        device = self.attach()
        self.assertEqual(self.attach(), device)
        self.assertEqual(len(self.disks()), 1)

    def test_the_volumes_own_path_ends_the_cache_too(self):
        self.attach()
        self.assertEqual(self.manager().detach_volume(), self.volume)
        self.assertEqual(self.disks(), [])
        self.assertEqual(self.manager().detach_volume(), self.volume)

    def test_a_volume_that_is_not_cacheable_stays_as_it_is(self):
        self.assertEqual(self.manager(cacheable=False).attach_volume(), self.volume)
        self.assertEqual(self.disks(), [])

    def test_a_cache_that_does_not_fit_leaves_nothing_behind(self):
        with self.assertRaisesRegex(exception.BrickException, "hob does not cache"):
            self.manager(config=self.changed(size="1T")).attach_volume()
        with self.assertRaisesRegex(exception.BrickException, "nowhere"):
            self.manager(config=self.changed(pool="nowhere")).attach_volume()
        self.assertEqual(self.disks(), [])

    def test_an_engine_without_a_daemon_is_not_ready(self):
        with self.assertRaisesRegex(exception.Invalid, "No valid cache engine"):
            self.manager(config=self.changed(control="unix:/nowhere.sock"))

    def test_settings_with_mistakes_are_refused(self):
        for keys, message in [({"poool": "x"}, "poool"), ({"pool": ""}, "'pool' is missing")]:
            with self.assertRaisesRegex(exception.BrickException, message):
                self.engine_with(self.changed(**keys))
        with self.assertRaisesRegex(exception.BrickException, "cannot read"):
            self.engine_with("/nowhere.conf")

    def engine_with(self, config):
        return engine.HobEngine(root_helper="sudo", hob_config=config)

    def test_a_device_in_use_is_not_detached(self):
        device = self.attach()
        with open(device, "rb"), mock.patch.object(engine, "RELEASE_SECONDS_MAX", 1):
            with self.assertRaisesRegex(exception.BrickException, "cannot remove"):
                self.manager(path=device).detach_volume()
            [disk] = self.disks()
        self.assertEqual(self.manager().detach_volume(), disk["backing"])

    def test_a_disk_that_remains_after_a_restart_of_the_host_is_replaced(self):
        first = self.attach(hob_volume="id-1")
        run("losetup", "--detach", first)
        # The volume has another path now.
        other = self.loop()
        device = self.attach(path=other, hob_volume="id-1")
        [disk] = self.disks()
        self.assertEqual((disk["name"], disk["backing"]), ("brick-id-1", other))
        with self.assertRaisesRegex(exception.BrickException, "is the cache of"):
            self.manager(hob_volume="id-1").attach_volume()
        self.assertEqual(self.manager(path=device).detach_volume(), other)

    def test_an_identifier_finds_the_cache_without_a_path(self):
        self.attach(hob_volume="id-2")
        self.assertEqual(self.engine(hob_volume="id-2").detach_volume(dev_path="id-2"), self.volume)
        self.assertEqual(self.disks(), [])

    def test_a_device_that_has_lost_its_file_is_detached(self):
        device = self.attach(hob_volume="id-3")
        [disk] = self.disks()
        # This is what remains when the daemon is killed.
        run("umount", "--lazy", disk["fuse"])
        self.assertEqual(self.file_of(device), "/")
        with self.assertRaisesRegex(exception.BrickException, "has lost hob's file"):
            self.engine().detach_volume(dev_path=device)
        detached = self.engine(hob_volume="id-3").detach_volume(dev_path=device)
        self.assertEqual(detached, self.volume)
        # Another program may use the device by now.
        self.assertNotEqual(self.file_of(device), "/")
        self.assertEqual(self.disks(), [])

    def test_a_volume_grows_while_it_is_used(self):
        device = self.attach()
        os.truncate(VOLUME, SIZE + (4 << 20))
        run("losetup", "--set-capacity", self.volume)
        self.assertEqual(self.engine().extend_volume(dev_path=device), SIZE + (4 << 20))
        self.assertEqual(int(run("blockdev", "--getsize64", device)), SIZE + (4 << 20))

    def test_long_paths_have_distinct_names(self):
        names = {engine.disk_name(f"/dev/disk/by-path/{'x' * 100}-lun-{lun}") for lun in range(3)}
        self.assertEqual(len(names), 3)
        self.assertTrue(all(len(name) <= engine.NAME_CHARS_MAX for name in names))


if __name__ == "__main__":
    unittest.main()
