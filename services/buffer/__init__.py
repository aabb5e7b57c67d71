"""Trajectory buffer: admission, group assembly and exactly-once consumption on Redis Streams."""
