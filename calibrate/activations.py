"""Hidden states of all samples between two blocks: in memory up to a budget, the rest in files.

A sweep over the blocks reads every state in order and writes it back. So the states that fit stay in memory and the
others always come from their files: a cache that dropped the oldest would miss each time. A state is one safetensors
file; `save` writes the whole chain beside its place and renames it, so a killed run leaves the last one whole.

Letters: N samples of one batch, L tokens of a sample, D hidden size.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from quantkit.kernels.errors import QuantkitError


@dataclass(frozen=True, slots=True)
class State:
    """What enters a block: hidden states [N, L, D] of samples of equal length, and what else the family passes on.

    `rest` is None for a family whose layers return a tensor, else the other members of their tuple (GLM-DSA: the token
    indices that its next layers share).
    """

    hidden: torch.Tensor
    rest: tuple[torch.Tensor | None, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return self.hidden.nbytes + sum(r.nbytes for r in self.rest or () if r is not None)


class Activations:
    """A list of states. `memory` bytes of them stay in memory; `folder` (default: the system's temporary folder) takes
    the others until `close`.
    """

    def __init__(self, states: Iterable[State] = (), *, memory: int, folder: Path | None = None) -> None:
        self._memory, self._used = memory, 0
        self._kept: list[State | None] = []
        self._folder = Path(tempfile.mkdtemp(prefix="activations-", dir=folder))
        for state in states:
            self.append(state)

    def __enter__(self) -> Activations:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> State:
        """State `index`, on the CPU; raises IndexError."""
        state = self._kept[index]
        return _load(self._file(index)) if state is None else state

    def __setitem__(self, index: int, state: State) -> None:
        """Put another state in its place, in memory when it fits and in its file when not."""
        old = self._kept[index]
        self._used -= 0 if old is None else old.nbytes
        self._kept[index] = self._keep(index, state)

    def __iter__(self) -> Iterator[State]:
        return (self[i] for i in range(len(self)))

    def append(self, state: State) -> None:
        """One more state at the end."""
        self._kept.append(None)
        self._kept[-1] = self._keep(len(self._kept) - 1, state)

    @property
    def nbytes_in_memory(self) -> int:
        """Bytes of the states that are not in files."""
        return self._used

    def save(self, folder: Path) -> None:
        """Write the chain to `folder`: all of it, or (after a kill) nothing.

        Give each block a folder of its own and remove the last one afterwards: a folder that exists is replaced.
        """
        beside = folder.with_name(folder.name + ".partial")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        for i, state in enumerate(self._kept):
            if state is None:
                shutil.copyfile(self._file(i), beside / self._file(i).name)
            else:
                _store(state, beside / self._file(i).name)
        (beside / "count").write_text(str(len(self)))
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)

    @classmethod
    def load(cls, saved: Path, *, memory: int, folder: Path | None = None) -> Activations:
        """A chain that `save` wrote; raises QuantkitError when it is not whole."""
        count = saved / "count"
        files = sorted(saved.glob("state-*.safetensors"))
        if not count.is_file() or int(count.read_text()) != len(files):
            raise QuantkitError(
                "the saved activations are not whole", file=saved, value=f"{len(files)} states",
                hint="remove the folder and start the run again",
            )  # fmt: skip
        return cls((_load(f) for f in files), memory=memory, folder=folder)

    def close(self) -> None:
        """Free the memory and remove the files."""
        self._kept.clear()
        self._used = 0
        shutil.rmtree(self._folder, ignore_errors=True)

    def _file(self, index: int) -> Path:
        return self._folder / f"state-{index:06d}.safetensors"

    def _keep(self, index: int, state: State) -> State | None:
        if self._used + state.nbytes > self._memory:
            _store(state, self._file(index))
            return None
        self._used += state.nbytes
        self._file(index).unlink(missing_ok=True)
        rest = state.rest
        moved = None if rest is None else tuple(None if r is None else r.to("cpu") for r in rest)
        return State(state.hidden.to("cpu"), moved)


def _store(state: State, file: Path) -> None:
    from safetensors.torch import save_file

    tensors = {"hidden": state.hidden}
    tensors |= {f"rest.{i}": r for i, r in enumerate(state.rest or ()) if r is not None}
    count = -1 if state.rest is None else len(state.rest)
    save_file({n: t.to("cpu").contiguous() for n, t in tensors.items()}, file, metadata={"rest": str(count)})


def _load(file: Path) -> State:
    from safetensors import safe_open

    with safe_open(file, "pt") as f:
        tensors = {name: f.get_tensor(name).clone() for name in f.keys()}  # noqa: SIM118  (not a mapping)
        count = int(f.metadata()["rest"])
    rest = None if count < 0 else tuple(tensors.get(f"rest.{i}") for i in range(count))
    return State(tensors["hidden"], rest)
