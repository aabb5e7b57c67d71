def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """Return DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13): from 0 at max_length - buffer tokens linearly
    to -1 at max_length.
    """
    excess = length - (max_length - buffer)
    return -min(max(excess / buffer, 0.0), 1.0)
