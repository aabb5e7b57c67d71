"""Transports that move the bytes of weight versions."""
