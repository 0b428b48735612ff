"""Identity of a sample's content: equal on every rank that reads the same data, whatever the path or the
clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from evenspan.errors import DataError

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


def content_fingerprint(content: object) -> bytes:
    """16 bytes of a batch: tensors (on any device), arrays, numbers, text and nests of them.

    Shapes, types and the structure count. Raises DataError D908 on anything else.
    """
    return combined_fingerprint(_parts(content))


def _parts(content: object) -> Iterator[bytes | str | int]:
    match content:
        case Tensor():
            host = content.detach().cpu().contiguous()
            yield f"tensor {host.dtype} {tuple(host.shape)}"
            # As bytes: numpy does not know every type of torch.
            yield host.reshape(-1).view(torch.uint8).numpy().tobytes()
        case np.ndarray() if content.dtype != object:
            yield f"array {content.dtype.str} {content.shape}"
            yield np.ascontiguousarray(content).tobytes()
        case None | bool() | int() | float() | str() | bytes() | np.generic():
            yield f"{type(content).__name__} {content!r}"
        case Mapping():
            yield f"mapping {len(content)}"
            for key in sorted(content, key=repr):
                yield from (*_parts(key), *_parts(content[key]))
        case Sequence():
            yield f"sequence {len(content)}"
            for item in content:
                yield from _parts(item)
        case _:
            raise DataError(
                "D908",
                f"a batch with a {type(content).__name__} has no fingerprint",
                hint="pass tensors, arrays, numbers, text, and dictionaries and lists of them",
            )
