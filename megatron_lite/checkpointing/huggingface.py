"""Folders of Hugging Face models, read and written one tensor at a time: names, shapes and bytes, no model.

    config.json                     the model's shape                            models/*/hf_names.py
    model.safetensors               8 bytes: length of the header | JSON header: name -> dtype, shape, place | bytes
    model-00001-of-00003.safetensors ... with model.safetensors.index.json       large models: name -> file
    pytorch_model.bin               older: a pickle, read with weights_only, so that it runs no code; never written

The safetensors library writes what it holds in memory and reads through a mapping of the whole file. Here a file's
header is computed from shapes alone and tensors follow one by one, so that a model may be larger than the memory; what
is written, the library reads, and the other way round.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpointing.folders import explained, flush_folder, write_file
from megatron_lite.checkpointing.plain_values import READ_ERRORS
from megatron_lite.checkpointing.sharded import SavedTensor
from megatron_lite.errors import CheckpointError, ConfigError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
# Beside a model's weights: whatever of these is there is copied along with a tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "generation_config.json",
)

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_LONGEST_HEADER = 100 << 20  # the library's own bound


@dataclass(frozen=True)
class _Place:
    file: Path
    offset: int
    facts: SavedTensor


class HuggingFaceFolder:
    """The tensors of a folder, found by the headers of its files; `read` brings one of them.

    Raises: CheckpointError for a folder without weights, for torn files, and for a pickle that would run code.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._places: dict[str, _Place] = {}
        self._loaded: dict[str, Tensor] = {}  # of pytorch_model.bin: mapped, not read
        for file in self._files():
            with explained(f"read {file}"):
                pickled = _read_pickle(file) if file.suffix == ".bin" else {}
                places = {} if file.suffix == ".bin" else _read_header(file)
            for name in {**pickled, **places}:
                if name in self._places or name in self._loaded:
                    raise CheckpointError(f"two files of {folder} hold the tensor {name}", fix="remove one of them")
            self._loaded |= pickled
            self._places |= places

    @property
    def tensors(self) -> dict[str, SavedTensor]:
        """Name -> shape and dtype."""
        loaded = {name: SavedTensor(tuple(t.shape), t.dtype) for name, t in self._loaded.items()}
        return {name: place.facts for name, place in self._places.items()} | loaded

    def read(self, name: str) -> Tensor:
        """One tensor. Raises: CheckpointError."""
        if name in self._loaded:
            return self._loaded[name]
        place = self._places[name]
        size = math.prod(place.facts.shape) * place.facts.dtype.itemsize
        data = torch.empty(size, dtype=torch.uint8)
        with explained(f"read {place.file}"), open(place.file, "rb", buffering=0) as file:
            file.seek(place.offset)
            view = memoryview(data.numpy())  # type: ignore[arg-type]
            while view and (count := file.readinto(view)):
                view = view[count:]
        if view:
            raise CheckpointError(f"{place.file} ends within {name}", why="the file is torn", fix="copy it again")
        return data.view(place.facts.dtype).view(place.facts.shape)

    def _files(self) -> list[Path]:
        for name in ("model.safetensors", "pytorch_model.bin"):
            index = self.folder / f"{name}.index.json"
            if index.is_file():
                names = sorted(set(read_json(index).get("weight_map", {}).values()))
                if not all(isinstance(name, str) and Path(name).name == name for name in names):
                    raise CheckpointError(f"{index} names files outside of its folder", why="the file is damaged")
                missing = [name for name in names if not (self.folder / name).is_file()]
                if missing or not names:
                    raise CheckpointError(
                        f"{self.folder} lacks {', '.join(missing) or 'weights'}",
                        why=f"{index.name} names it" if missing else f"{index.name} is empty",
                        fix="download or copy the model again",
                    )
                return [self.folder / name for name in names]
            if (self.folder / name).is_file():
                return [self.folder / name]
        raise CheckpointError(
            f"{self.folder} holds no weights",
            why="there is neither model.safetensors nor pytorch_model.bin, nor an index of several such files",
            fix="the folder of a Hugging Face model (as save_pretrained writes it)",
        )


def _read_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a pytorch_model.bin, mapped into memory. Raises: CheckpointError."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except READ_ERRORS as error:
        raise CheckpointError(
            f"cannot read {file}: {(str(error).splitlines() or [''])[0][:200]}",
            why="it is damaged, of a very old format, or holds more than tensors, which is never run",
            fix="a folder with safetensors files",
        ) from error
    if not isinstance(state, dict) or not all(isinstance(item, Tensor) for item in state.values()):
        raise CheckpointError(f"{file} holds something else than tensors", fix="a folder with safetensors files")
    return state


def _read_header(path: Path) -> dict[str, _Place]:
    """Where the tensors of one file lie. Raises: CheckpointError, OSError."""

    def damaged(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: {what}", why="the file is torn or no safetensors file", fix="copy it again")

    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise damaged(f"a header of {length} bytes in a file of {size}")
        try:
            header = json.loads(file.read(length))
            tensors = {name: item for name, item in header.items() if name != "__metadata__"}
            places = {}
            for name, item in tensors.items():
                facts = SavedTensor(tuple(map(int, item["shape"])), _DTYPES[item["dtype"]])
                begin, end = map(int, item["data_offsets"])
                if not 0 <= begin <= end or end - begin != math.prod(facts.shape) * facts.dtype.itemsize:
                    raise damaged(f"{name} of shape {list(facts.shape)} has {end - begin} bytes")
                places[name] = _Place(path, 8 + length + begin, facts)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(f"the header is not readable ({type(error).__name__}: {error})") from error
    end = max((8 + length + int(item["data_offsets"][1]) for item in tensors.values()), default=8 + length)
    if end != size:
        raise damaged(f"the file has {size} bytes instead of {end}")
    return places


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds a table. Raises: CheckpointError."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", why="the file is damaged or missing") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no table", why="the file is damaged")
    return value


# -- writing -----------------------------------------------------------------------------------------------------


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, SavedTensor],
    produce: Callable[[str], Tensor],
    *,
    copies: Iterable[Path] = (),
    shard_bytes: int = 5 << 30,
) -> None:
    """Write a model's folder; it appears under its name when it is complete.

    Args:
        folder: new, or empty.
        config: becomes config.json.
        tensors: what will be written, in this order.
        produce: name -> the tensor; called once a name, and its result is dropped before the next call.
        copies: files that go along.
        shard_bytes: largest size of one file; a larger tensor has a file of its own.
    Raises: ConfigError if the folder holds something; CheckpointError.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty", why="a model gets a folder of its own", fix="name a new folder")
    temporary = folder.with_name(f".{folder.name}.tmp-{secrets.token_hex(4)}")
    try:
        with explained(f"write {folder}"):
            temporary.mkdir(parents=True)
            shards = _shards(tensors, shard_bytes)
            names = [
                "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
                for i in range(1, len(shards) + 1)
            ]
            for name, shard in zip(names, shards):
                _write_file(temporary / name, {key: tensors[key] for key in shard}, produce)
            if len(shards) > 1:
                total = sum(_bytes(facts) for facts in tensors.values())
                places = {key: name for name, shard in zip(names, shards) for key in shard}
                _write_json(temporary / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
            for source in copies:
                shutil.copyfile(source, temporary / source.name)
            _write_json(temporary / CONFIG, config)
            flush_folder(temporary)
            os.rename(temporary, folder)  # takes the place of an empty folder too
            flush_folder(folder.parent)
    except BaseException:
        with suppress(OSError):
            shutil.rmtree(temporary)
        raise


def _shards(tensors: Mapping[str, SavedTensor], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name, facts in tensors.items():
        if shards[-1] and held + _bytes(facts) > limit:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += _bytes(facts)
    return shards


def _write_file(path: Path, tensors: Mapping[str, SavedTensor], produce: Callable[[str], Tensor]) -> None:
    # Wide elements first: then every tensor starts at a multiple of its element's size.
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        begin, end = end, end + _bytes(tensors[name])
        code, shape = _CODES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            tensor = produce(name).contiguous()
            assert SavedTensor(tuple(tensor.shape), tensor.dtype) == tensors[name], (name, tensor.shape, tensor.dtype)
            file.write(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            del tensor
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_file(path, (json.dumps(value, indent=2) + "\n").encode())


def _bytes(facts: SavedTensor) -> int:
    return math.prod(facts.shape) * facts.dtype.itemsize
