"""Kernel isolation of programs; every sandboxed process imports it, so only ctypes and the standard library."""
