"""hob as a volume cache of os-brick (os_brick.caches).

os-brick has a fixed table of cache engines and no entry points for others. A program calls
register() once, and can then use the engine "hob" with os_brick.caches.CacheManager.
"""

from os_brick import caches

ENGINE_NAME = "hob"


def register():
    """Adds hob to os-brick's table of cache engines."""
    path = "hob_os_brick.engine.HobEngine"
    caches.CACHE_ENGINE_TO_CACHE_CLASS_MAP[ENGINE_NAME] = path
