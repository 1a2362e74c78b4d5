"""A stub of Nova's libvirt driver: the order in which it calls connectors and encryptors."""


class LibvirtDriver:
    def _connect_volume(self, context, connection_info, instance, encryption=None):
        connector = self._get_volume_driver(connection_info)
        connector.connect_volume(connection_info, instance)
        try:
            self._attach_encryptor(context, connection_info, encryption)
        except Exception:
            connector.disconnect_volume(connection_info, instance)
            raise

    def _disconnect_volume(self, context, connection_info, instance, encryption=None):
        self._detach_encryptor(context, connection_info, encryption=encryption)
        connector = self._get_volume_driver(connection_info)
        connector.disconnect_volume(connection_info, instance, force=False)

    def pre_live_migration(self, context, connection_info):
        self._connect_volume(context, connection_info, None)

    def _extend_volume(self, connection_info, instance, requested_size):
        return self._get_volume_driver(connection_info).extend_volume(
            connection_info, instance, requested_size)
