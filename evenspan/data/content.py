"""Identity of a batch's content, for loaders of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from evenspan.data.fingerprint import combined_fingerprint
from evenspan.errors import DataError


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
