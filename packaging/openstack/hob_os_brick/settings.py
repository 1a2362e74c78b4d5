"""Settings of the cache engine: the section [hob] of /etc/hob/os-brick.conf."""

import configparser
import dataclasses

from os_brick import exception

CONFIG_PATH = "/etc/hob/os-brick.conf"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings for all volumes of this host."""

    # Pool of hob that has the caches.
    pool: str
    # Size of each cache, for example "16G". If empty, the caches share the pool.
    size: str = ""
    # Control socket of hob's daemon.
    control: str = "unix:/run/hob/control.sock"
    # Directory for hob's files (FUSE), which are below the loop devices.
    directory: str = "/run/hob"
    # Path or name of the program hob.
    program: str = "hob"


def load(path):
    """Reads the settings.

    :raises BrickException: the file is missing or has an unknown or missing key
    """
    parser = configparser.ConfigParser(interpolation=None)
    try:
        with open(path, encoding="utf-8") as file:
            parser.read_file(file)
        values = dict(parser["hob"])
    except (OSError, configparser.Error, KeyError) as error:
        raise exception.BrickException(f"cannot read [hob] in {path}: {error}") from error
    known = {field.name for field in dataclasses.fields(Settings)}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise exception.BrickException(f"{path}: unknown keys: {', '.join(unknown)}")
    if not values.get("pool"):
        raise exception.BrickException(f"{path}: the key 'pool' is missing")
    return Settings(**values)
