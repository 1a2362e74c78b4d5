"""A stub."""


def get_root_helper():
    return "sudo"
