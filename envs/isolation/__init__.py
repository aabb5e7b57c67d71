"""Kernel isolation for programs, by ctypes and the standard library alone: every sandboxed process imports it."""
