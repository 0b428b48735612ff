"""Identity of a sample's content: equal on every rank that reads the same data, whatever the path or the
clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

EDGE_BYTES = 64 * 1024


def file_fingerprint(path: Path) -> bytes:
    """16 bytes from the size and the first and last 64 KiB of a file; not from its path or time."""
    digest = hashlib.blake2b(digest_size=16)
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        digest.update(file.read(EDGE_BYTES))
        file.seek(max(size - EDGE_BYTES, 0))
        digest.update(file.read(EDGE_BYTES))
    return digest.digest()


def combined_fingerprint(parts: Iterable[bytes | str | int]) -> bytes:
    """16 bytes of the parts in order; no two different lists of parts read alike."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()
