"""A stub."""


def get_volume_id(connection_info):
    return connection_info["data"].get("volume_id") or connection_info.get("serial")
