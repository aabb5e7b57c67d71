"""Digest of what the policy sees."""

from hashlib import blake2b


def hash_state(observation: str, png: bytes = b"") -> str:
    return blake2b(observation.encode() + png, digest_size=8).hexdigest()
