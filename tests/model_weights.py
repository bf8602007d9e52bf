"""Checkpoints as the block-by-block forward wants them, and the ordinary model of transformers to compare with.

`InMemory` holds decoded tensors, `OnDisk` reads one tensor at a time. The reference model gets the same float32 values by
transformers' own loader and owns its memory: a matrix that starts at another alignment is multiplied along another path.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from families import Tensors, load_tensors, read_config, save_tensors, write_config
from safetensors import safe_open

torch.set_num_threads(1)  # the matrices are tiny: on a busy machine two threads wait for each other forty times as long


class InMemory:
    """Plain `tensors`, and `decoded` ones (outputs by inputs) of quantised layers."""

    def __init__(self, tensors: Tensors, decoded: Tensors | None = None) -> None:
        self.tensors = tensors | (decoded or {})
        self.codes = set(decoded or ())
        self.read_names: list[str] = []

    def names(self) -> Iterable[str]:
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def quantized(self, name: str) -> bool:
        return name in self.codes

    def read(self, name: str) -> torch.Tensor:
        self.read_names.append(name)
        return self.tensors[name].clone()

    def read_expert(self, name: str, expert: int) -> torch.Tensor:
        self.read_names.append(f"{name}.{expert}")
        return self.tensors[name][expert].clone()


class OnDisk:
    """One safetensors file, opened for each tensor, so that nothing stays mapped."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with safe_open(file, "pt") as f:
            self.shapes = {n: tuple(f.get_slice(n).get_shape()) for n in f.keys()}  # noqa: SIM118

    def names(self) -> Iterable[str]:
        return self.shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def quantized(self, name: str) -> bool:
        return False

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self.file, "pt") as f:
            return f.get_tensor(name).clone()

    def read_expert(self, name: str, expert: int) -> torch.Tensor:
        with safe_open(self.file, "pt") as f:
            return f.get_slice(name)[expert].clone()


def plain(folder: Path) -> InMemory:
    """The tensors of a checkpoint that is not quantised."""
    return InMemory(load_tensors(folder))


def reference(
    folder: Path, tensors: Tensors | None = None, prefix: str = "", dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """The ordinary model of a checkpoint; `tensors` in place of its own, `prefix` taken off their names."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if tensors is not None:
        copy = folder.with_name(folder.name + "-reference")
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        config = read_config(folder)
        config = config.get("text_config", config)
        config.pop("quantization_config", None)
        write_config(copy, config)
        save_tensors(copy, {n.removeprefix(prefix): t.contiguous() for n, t in tensors.items() if n.startswith(prefix)})
        folder = copy
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
        parameter.requires_grad_(False)
    return model


def token_ids(samples: int, length: int, seed: int = 0, vocabulary: int = 384) -> torch.Tensor:
    """Random token ids [samples, length]."""
    return torch.randint(3, vocabulary, (samples, length), generator=torch.Generator().manual_seed(seed))


def set_config(folder: Path, **settings: object) -> None:
    """Change keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
