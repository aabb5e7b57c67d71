"""Penalties on an episode's reward."""


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """Return DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13): 0 up to max_length - buffer tokens, falling
    linearly to -1 at max_length, -1 beyond."""
    excess = length - (max_length - buffer)
    return -min(max(excess / buffer, 0.0), 1.0)
