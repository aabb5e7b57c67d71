"""Kernel isolation; imports only the standard library, because every sandboxed process imports it."""
