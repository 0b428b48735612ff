"""DiT weights in the folder layout of diffusers: `config.json` and safetensors, whole or in indexed shards.

Headers are compared before any tensor is read, so a model that does not fit is refused in milliseconds and
with every difference at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from evenspan.errors import ModelError
from evenspan.model.wan import CausalWan
from evenspan.model.wan_config import WanConfig

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
INDEX_NAME = WEIGHTS_NAME + ".index.json"
CLASS_NAME = "WanTransformer3DModel"
_DIFFUSERS_VERSION = "0.36.0"  # the first version whose reader this layout was checked with
_NEAR_NAMES = 20  # difflib is quadratic: beyond this many keys the lists speak for themselves


def read_config(folder: str | Path) -> WanConfig:
    """The DiT a diffusers folder holds. Raises ModelError M201 (not such a folder), M102, M103."""
    path = Path(folder) / CONFIG_NAME
    if not path.is_file():
        raise _no_folder(Path(folder), f"{path} does not exist")
    content = _read_json(path)
    kind = content.get("_class_name")
    if kind != CLASS_NAME:
        raise _no_folder(Path(folder), f"{path} describes a {kind}, not a {CLASS_NAME}")
    return WanConfig().with_overrides(
        {name: value for name, value in content.items() if not name.startswith("_")}
    )


def load_diffusers_folder(model: CausalWan, folder: str | Path) -> None:
    """Copy the weights of `folder` into `model`, in the model's dtype and on its device.

    Raises ModelError M201 (files missing), M202 (fields or keys that do not fit, all of them), M203
    (unreadable file); the model is untouched by M201, M202 and truncated files.
    """
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in checked_weights(model, folder):
            parameters[name].copy_(value)


def checked_weights(model: CausalWan, folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Name and CPU tensor of every parameter, one at a time, after all headers were found to fit `model`.

    For callers that place the values themselves (sharded parameters). Errors as `load_diffusers_folder`.
    """
    folder = Path(folder)
    config = read_config(folder)
    files = _weight_files(folder)
    headers = {path: _header(path) for path in files}
    _require_fit(model, folder, config, {name: shape for h in headers.values() for name, shape in h.items()})
    for path, header in headers.items():
        with safe_open(path, framework="pt") as reader:
            for name in header:
                yield name, reader.get_tensor(name)


def save_diffusers_folder(folder: str | Path, *, config: WanConfig, state_dict: Mapping[str, Tensor]) -> None:
    """Write a folder that diffusers' `WanTransformer3DModel.from_pretrained` reads.

    Written beside its place and renamed, so a folder of that name is always complete. `state_dict` holds full
    tensors (of a sharded model: gathered). Raises ModelError M204 when the folder exists.
    """
    folder = Path(folder)
    if folder.exists():
        raise ModelError("M204", f"{folder} exists", hint="name a new folder, or move the old one away")
    folder.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "_class_name": CLASS_NAME,
        "_diffusers_version": _DIFFUSERS_VERSION,
        **dataclasses.asdict(config),
    }
    tensors = {name: value.detach().cpu().contiguous() for name, value in state_dict.items()}
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        (temporary / CONFIG_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, temporary / WEIGHTS_NAME, metadata={"format": "pt"})
        temporary.chmod(0o755)  # mkdtemp's 0700 would hide the result from everyone else
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / WEIGHTS_NAME, folder / INDEX_NAME
    if single.is_file():
        return [single]
    if not index.is_file():
        raise _no_folder(folder, f"neither {WEIGHTS_NAME} nor {INDEX_NAME} is in {folder}")
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise ModelError("M203", f"{index} has no weight_map", hint="fetch the file again")
    files = [folder / name for name in sorted(set(shards.values()))]
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise _no_folder(folder, f"{INDEX_NAME} names files that are absent: {', '.join(absent)}")
    return files


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name; opening also compares the file's length with its header's."""
    try:
        with safe_open(path, framework="pt") as reader:
            return {name: tuple(reader.get_slice(name).get_shape()) for name in sorted(reader.keys())}
    except SafetensorError as error:
        size = path.stat().st_size
        raise ModelError(
            "M203",
            f"{path} ({size} bytes) is truncated or no safetensors file: {error}",
            hint="fetch the file again; compare its size with the source",
        ) from error


def _require_fit(
    model: CausalWan, folder: Path, config: WanConfig, found: Mapping[str, tuple[int, ...]]
) -> None:
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    missing = sorted(set(wanted) - set(found))
    extra = sorted(set(found) - set(wanted))
    misshaped = sorted(name for name in set(wanted) & set(found) if wanted[name] != found[name])
    lines = [
        f"field {field.name}: the model has {_field(model.config, field)}, the folder {_field(config, field)}"
        for field in dataclasses.fields(WanConfig)
        if _field(model.config, field) != _field(config, field)
    ]
    lines += _listed("missing", missing, extra)
    lines += _listed("not in the model", extra, missing)
    lines += [
        f"shape of {name}: the model has {list(wanted[name])}, the folder {list(found[name])}"
        for name in misshaped
    ]
    if lines:
        raise ModelError(
            "M202",
            f"the weights in {folder} do not fit the model: {len(lines)} differences\n       "
            + "\n       ".join(lines),
            hint="build the model from the folder (read_config), or name the folder that holds this model",
        )


def _listed(label: str, names: Sequence[str], others: Sequence[str]) -> list[str]:
    lines = []
    for index, name in enumerate(names):
        near = difflib.get_close_matches(name, others, n=1, cutoff=0.7) if index < _NEAR_NAMES else []
        lines.append(f"{label}: {name}" + (f" (nearest: {near[0]})" if near else ""))
    return lines


def _field(config: WanConfig, field: dataclasses.Field[object]) -> object:
    return getattr(config, field.name)


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError("M203", f"{path} is not JSON: {error}", hint="fetch the file again") from error
    if not isinstance(content, dict):
        raise ModelError("M203", f"{path} holds no JSON object", hint="fetch the file again")
    return content


def _no_folder(folder: Path, fact: str) -> ModelError:
    inner = folder / "transformer"
    hint = (
        f"use {inner}"
        if inner.is_dir()
        else f"a folder of diffusers weights holds {CONFIG_NAME} and {WEIGHTS_NAME} or {INDEX_NAME}"
    )
    return ModelError("M201", fact, hint=hint)
