"""Digest of what the policy sees in a turn."""

from hashlib import blake2b


def hash_state(observation: str, png: bytes = b"") -> str:
    """png: the image, of an env that shows images."""
    return blake2b(observation.encode() + png, digest_size=8).hexdigest()
