"""Tests of the libvirt driver with stubs of Nova, or with Nova itself if PYTHONPATH has it first."""

import unittest
from unittest import mock

from nova.virt.libvirt import driver

from hob_os_brick import nova

VOLUME = "/dev/sdb"
CACHED = "/dev/loop7"


class Connector:
    """Connects volumes, and notes the device path of each volume that it disconnects."""

    def __init__(self):
        self.disconnected = []

    def connect_volume(self, connection_info, instance):
        connection_info["data"]["device_path"] = VOLUME

    def disconnect_volume(self, connection_info, instance, force=False):
        self.disconnected.append(connection_info["data"].get("device_path"))

    def extend_volume(self, connection_info, instance, requested_size):
        return requested_size


class NovaTest(unittest.TestCase):
    def setUp(self):
        self.driver = object.__new__(nova.LibvirtDriver)
        self.driver._local = nova.threading.local()
        self.connector = Connector()
        self.engine = mock.Mock()
        self.engine.attach_volume.return_value = CACHED
        self.engine.detach_volume.return_value = VOLUME
        self.engine.extend_volume.return_value = None
        self.attach_encryptor = mock.Mock()
        self.patch(nova.engine, "HobEngine", mock.Mock(return_value=self.engine))
        base = driver.LibvirtDriver
        self.patch(base, "_get_volume_driver", lambda _, info: self.connector)
        self.patch(base, "_should_disconnect_target", lambda *_: True)
        self.patch(base, "_attach_encryptor", self.attach_encryptor)
        self.patch(base, "_detach_encryptor", mock.Mock())

    def patch(self, owner, name, value):
        patcher = mock.patch.object(owner, name, value, create=True)
        patcher.start()
        self.addCleanup(patcher.stop)

    @staticmethod
    def info(**data):
        return {"serial": "id-1", "data": {"cacheable": True, **data}}

    def connect(self, info):
        self.driver._connect_volume(None, info, None)
        return info["data"]["device_path"]

    def disconnect(self, info):
        self.driver._disconnect_volume(None, info, None)

    def test_a_volume_has_a_cache_while_it_is_connected(self):
        info = self.info()
        self.assertEqual(self.connect(info), CACHED)
        self.engine.attach_volume.assert_called_once_with(dev_path=VOLUME)
        nova.engine.HobEngine.assert_called_once_with(root_helper=mock.ANY, hob_volume="id-1")
        self.disconnect(info)
        self.engine.detach_volume.assert_called_once_with(dev_path=CACHED)
        self.assertEqual(self.connector.disconnected, [VOLUME])

    def test_a_refreshed_connection_finds_the_cache(self):
        self.connect(self.info())
        self.disconnect(self.info())
        self.engine.detach_volume.assert_called_once_with(dev_path="id-1")

    def test_other_volumes_have_no_cache(self):
        for info in [
            self.info(cacheable=False),
            self.info(encrypted=True),
            {**self.info(), "multiattach": True},
        ]:
            self.assertEqual(self.connect(info), VOLUME)
            self.disconnect(info)
        self.assertEqual(self.engine.method_calls, [])

    def test_a_volume_without_a_cache_is_used_directly(self):
        self.engine.attach_volume.side_effect = RuntimeError("no room")
        with self.assertLogs(nova.LOG.logger, "ERROR"):
            self.assertEqual(self.connect(self.info()), VOLUME)

    def test_an_encryptor_that_fails_ends_the_cache(self):
        self.attach_encryptor.side_effect = RuntimeError("no key")
        with self.assertRaisesRegex(RuntimeError, "no key"):
            self.connect(self.info())
        self.engine.detach_volume.assert_called_once_with(dev_path=CACHED)
        self.assertEqual(self.connector.disconnected, [VOLUME])

    def test_a_volume_stays_connected_if_its_cache_remains(self):
        info = self.info()
        self.connect(info)
        self.engine.detach_volume.side_effect = RuntimeError("in use")
        with self.assertRaisesRegex(RuntimeError, "in use"):
            self.disconnect(info)
        self.assertEqual(self.connector.disconnected, [])

    def test_an_incoming_vm_has_no_caches(self):
        info = self.info()

        def connect(driver_self):
            driver_self._connect_volume(None, info, None)

        self.patch(driver.LibvirtDriver, "pre_live_migration", connect)
        self.driver.pre_live_migration()
        self.assertEqual(info["data"]["device_path"], VOLUME)
        self.engine.attach_volume.assert_not_called()
        self.assertEqual(self.connect(self.info()), CACHED)

    def test_a_grown_volume_has_the_size_of_its_cache(self):
        info = self.info()
        self.connect(info)
        self.assertEqual(self.driver._extend_volume(info, None, 5), 5)
        self.engine.extend_volume.return_value = 7
        self.assertEqual(self.driver._extend_volume(info, None, 5), 7)
        self.engine.extend_volume.assert_called_with(dev_path=CACHED)


if __name__ == "__main__":
    unittest.main()
