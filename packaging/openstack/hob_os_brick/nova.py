"""A libvirt driver of Nova that caches volumes with hob.

Nova has no call of os-brick's caches. This driver adds the calls between the volume's connector and
its encryptor. Nova loads drivers from the package nova.virt only, so the driver needs a file there;
docs/OPENSTACK.md describes the installation.
"""

import contextlib
import threading

from nova import utils
from nova.virt import block_device
from nova.virt.libvirt import driver
from oslo_log import log as logging
from oslo_utils import excutils

from hob_os_brick import engine

LOG = logging.getLogger(__name__)


def may_have_cache(connection_info):
    """Returns true if hob caches volumes of this kind.

    Other hosts may write to a volume that is attached several times. os-brick's encryptors replace
    the volume's device path by a link, which must not happen to a loop device.
    """
    data = connection_info["data"]
    is_excluded = data.get("encrypted") or connection_info.get("multiattach")
    return bool(data.get("cacheable") and not is_excluded)


def path_or_id(connection_info):
    """Returns the device path of a volume, which is missing after Nova has refreshed the connection."""
    path = connection_info["data"].get("device_path")
    return path or block_device.get_volume_id(connection_info)


class LibvirtDriver(driver.LibvirtDriver):
    """Nova's libvirt driver, with a cache below each volume of a cacheable type."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._local = threading.local()

    def pre_live_migration(self, *args, **kwargs):
        """Connects the volumes of an incoming VM without caches.

        The source host still writes to the volumes, so a cache here could become stale.
        """
        with self._without_caches():
            return super().pre_live_migration(*args, **kwargs)

    def _attach_encryptor(self, context, connection_info, encryption):
        self._attach_cache(connection_info)
        try:
            return super()._attach_encryptor(context, connection_info, encryption)
        except Exception:
            with excutils.save_and_reraise_exception():
                self._detach_cache(connection_info)

    def _detach_encryptor(self, context, connection_info, encryption, destroy_secrets=True):
        super()._detach_encryptor(
            context, connection_info, encryption, destroy_secrets=destroy_secrets)
        self._detach_cache(connection_info)

    def _extend_volume(self, connection_info, instance, requested_size):
        size = super()._extend_volume(connection_info, instance, requested_size)
        if not may_have_cache(connection_info):
            return size
        engine_of_volume, path = self._engine(connection_info), path_or_id(connection_info)
        return engine_of_volume.extend_volume(dev_path=path) or size

    def _attach_cache(self, connection_info):
        """Replaces the device path. Without a cache, the VM uses the volume directly."""
        data = connection_info["data"]
        is_incoming = getattr(self._local, "is_incoming", False)
        if is_incoming or not may_have_cache(connection_info) or not data.get("device_path"):
            return
        try:
            cached = self._engine(connection_info).attach_volume(dev_path=data["device_path"])
        except Exception:
            LOG.exception("hob does not cache the volume at %s", data["device_path"])
            return
        data["device_path"] = cached

    def _detach_cache(self, connection_info):
        """Restores the device path.

        A failure stops the detachment: the volume must not disappear below hob's disk.
        """
        if not may_have_cache(connection_info):
            return
        path = path_or_id(connection_info)
        original = self._engine(connection_info).detach_volume(dev_path=path)
        data = connection_info["data"]
        if data.get("device_path"):
            data["device_path"] = original

    def _engine(self, connection_info):
        return engine.HobEngine(
            root_helper=utils.get_root_helper(),
            hob_volume=block_device.get_volume_id(connection_info))

    @contextlib.contextmanager
    def _without_caches(self):
        self._local.is_incoming = True
        try:
            yield
        finally:
            self._local.is_incoming = False
