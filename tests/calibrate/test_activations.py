"""States in memory and in files: what goes in comes out, the budget holds, a saved chain is whole or refused.

pytest tests/calibrate/test_activations.py
"""

import pytest
import torch
from quantkit.calibrate.activations import Activations, State
from quantkit.kernels.errors import QuantkitError


def state(seed, length=8, rest="none", dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, length, 16, generator=generator).to(dtype)
    more = {"none": None, "empty": (), "indices": (torch.arange(length), None)}[rest]
    return State(hidden, more)


def same(a, b):
    if not (a.hidden.dtype == b.hidden.dtype and torch.equal(a.hidden, b.hidden)):
        return False
    if a.rest is None or b.rest is None:
        return a.rest is b.rest
    pairs = zip(a.rest, b.rest, strict=True)
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("memory", [0, 8 * 16 * 4, 3 * 8 * 16 * 4 + 8, 10**9])
@pytest.mark.parametrize("rest", ["none", "empty", "indices"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_come_back_as_they_were(memory, rest, dtype, tmp_path):
    states = [state(i, 8 + i, rest, dtype) for i in range(5)]
    with Activations(states, memory=memory, folder=tmp_path) as chain:
        assert len(chain) == 5
        assert all(same(a, b) for a, b in zip(chain, states, strict=True))
        others = [state(i + 100, 20 - i, rest, dtype) for i in range(5)]
        for i, other in enumerate(others):
            chain[i] = other
            assert chain.nbytes_in_memory <= memory
        assert all(same(a, b) for a, b in zip(chain, others, strict=True))
        files = list(tmp_path.rglob("*.safetensors"))
        kept = sum(s.nbytes for s in others) - chain.nbytes_in_memory
        assert sum(f.stat().st_size for f in files) >= kept
        assert len(files) == (0 if memory == 10**9 else 5 if memory == 0 else len(files))
        with pytest.raises(IndexError):
            chain[5]
    assert not list(tmp_path.iterdir())


def test_as_many_states_as_fit_stay_in_memory(tmp_path):
    each = state(0).nbytes
    with Activations((state(i) for i in range(6)), memory=2 * each, folder=tmp_path) as chain:
        assert chain.nbytes_in_memory == 2 * each
        assert len(list(tmp_path.rglob("*.safetensors"))) == 4
        chain[0] = state(9, length=1)  # smaller: still only those that were in memory are there
        assert chain.nbytes_in_memory == each + state(9, length=1).nbytes


@pytest.mark.parametrize("memory", [0, 600, 10**9])
def test_a_saved_chain_is_loaded(memory, tmp_path):
    states = [state(i, rest="indices") for i in range(4)]
    with Activations(states, memory=memory, folder=tmp_path) as chain:
        chain.save(tmp_path / "block-3")
        chain[0] = state(77)
        chain.save(tmp_path / "block-4")
    for name, first in (("block-3", states[0]), ("block-4", state(77))):
        with Activations.load(tmp_path / name, memory=600, folder=tmp_path) as again:
            assert all(same(a, b) for a, b in zip(again, [first, *states[1:]], strict=True))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["block-3", "block-4"]


def test_a_chain_that_was_killed_while_it_was_saved(tmp_path):
    with Activations([state(0), state(1)], memory=0, folder=tmp_path) as chain:
        (tmp_path / "block-1.partial").mkdir()
        (tmp_path / "block-1.partial" / "state-000007.safetensors").write_bytes(b"half")
        chain.save(tmp_path / "block-1")
    (tmp_path / "block-1" / "state-000001.safetensors").unlink()
    with pytest.raises(QuantkitError, match="not whole") as error:
        Activations.load(tmp_path / "block-1", memory=0)
    assert error.value.value == "1 states"
    with pytest.raises(QuantkitError, match="not whole"):
        Activations.load(tmp_path / "nothing", memory=0)
