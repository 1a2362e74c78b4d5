"""Stubs of the parts of Nova that hob_os_brick.nova uses."""
