"""Smooth a block before its codes are chosen: search the scales of each set, fold them, keep what the export needs.

A pass over the samples shows the inputs of all sets as they are. Then every fold is made at once: the block computes
what it did before, with channels scaled inside, and whatever chooses codes next finds scaled weights and scaled inputs.
Tensors that are not quantised but changed (norms, routers, biases) are rounded to their stored dtype before the block
runs again, and go into the run folder.

Letters: T tokens, I inputs, O outputs (rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from quantkit.calibrate.activations import Activations, State
from quantkit.calibrate.block import Block
from quantkit.calibrate.input_watch import EXPERTS, InputWatch
from quantkit.calibrate.stats import Hessian, InputRange
from quantkit.export.sources.detect import Weight
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.methods import awq
from quantkit.quantize.plan import Plan, Task
from quantkit.quantize.run_folder import Stored
from quantkit.quantize.smoothing_sets import SmoothingSet, logical, smoothing_sets
from quantkit.quantize.waves import in_waves
from torch import Tensor

SEARCHED = 32  # matrices that decide the scales of a set, spread over its experts
PROBES = 8  # random tokens on which a folded norm is checked
CLOSE = 1e-4
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(slots=True)
class Smoothed:
    """tensors  plain tensors that changed, as stored;  facts  by layer;  changed  names of all that was scaled"""

    tensors: dict[str, Stored] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)


def smooth(
    block: Block, states: Activations, plan: Plan, tasks: Mapping[str, Task], memory: int, device: str,
    advance: Callable[[State], None],
) -> Smoothed:  # fmt: skip
    """Fold scales into the block for the layers of the method `awq`.

    tasks    layers of the block whose codes a calibration run chooses, by module
    memory   bytes for Hessians at a time
    advance  called with each state that was run

    Raises QuantkitError, naming the channels, for inputs that are not numbers.
    """
    done = Smoothed()
    weights = {t.weight.name: t.weight for t in plan.tasks}
    sets, reasons = smoothing_sets(block, tasks, weights)
    scales: list[tuple[SmoothingSet, awq.Smoothing]] = []
    for wave in _waves(sets, block, memory):
        watch = InputWatch({s.seen: block.shape(s.readers[0])[1] for s in wave}, device)
        for state in _run(block, states, watch, wave):
            advance(state)
        for s in wave:
            found = _search(block, s, *watch.result(s.seen), tasks, half=plan.half)
            if isinstance(found, str):
                reasons |= dict.fromkeys(s.calibrated, found)
            else:
                scales.append((s, found))
    for s, found in scales:  # after all waves: each sees the block as it was
        reason = _fold(block, s, found, weights, done)
        if reason:
            reasons |= dict.fromkeys(s.calibrated, reason)
    done.facts |= {n: {"into": None, "reason": r} for n, r in reasons.items() if tasks[n].method == "awq"}
    return done


def _waves(sets: Sequence[SmoothingSet], block: Block, memory: int) -> Iterator[list[SmoothingSet]]:
    """Sets whose Hessians fit into the memory together; those inside experts apart, since only they run the experts."""
    for inside in (False, True):
        wanted = (s for s in sets if s.expert == inside)
        yield from in_waves(wanted, lambda s: 4 * block.shape(s.readers[0])[1] ** 2, memory)


def _run(block: Block, states: Activations, watch: InputWatch, wave: Sequence[SmoothingSet]) -> Iterator[State]:
    """Show the inputs of a wave of sets; the experts are run where something inside them is wanted."""
    seen = {s.seen for s in wave}
    if EXPERTS not in seen:
        yield from block.show_all(states, watch, [names for names in block.linears() if seen & {*names}])
        return
    for state in states:
        block.run(state, observe=watch, experts=watch.before_experts)
        yield state


def _search(
    block: Block, s: SmoothingSet, hessian: Hessian, size: InputRange, tasks: Mapping[str, Task], *, half: bool
) -> awq.Smoothing | str:
    """The scales of a set, or why it has none."""
    if not hessian.tokens:
        return "it saw no token"
    scheme = tasks[s.calibrated[0]].scheme
    assert scheme is not None
    step = -(-len(s.calibrated) // SEARCHED)
    matrices = {n: block.weight(n) for n in s.calibrated[::step]}
    for name, w_OI in matrices.items():
        if not bool(torch.isfinite(w_OI).all()):
            raise QuantkitError("a weight holds NaN or infinity", tensor=name)
    rows_I = s.producer.rows(len(size.mean_I)) if s.producer.heads else None
    try:
        found = awq.search(
            hessian.h_II, size.mean_I, list(matrices.values()), scheme, half=half, rows_I=rows_I, powers=s.powers
        )
    except QuantkitError as e:
        raise QuantkitError(e.message, tensor=s.calibrated[0], value=e.value, allowed=e.allowed) from e
    return "no scale is better than none" if found.exponent is None else found


def _fold(
    block: Block, s: SmoothingSet, found: awq.Smoothing, weights: Mapping[str, Weight], done: Smoothed
) -> str | None:
    """Scale a set inside the block; a reason, with the block as it was, where that would lose something."""
    made = _norm(block, s, found.s_I, weights) if s.producer.vector else _rows(block, s, found.s_I)
    if isinstance(made, str):
        return made
    new, s_I = made
    for name in s.readers:
        w_OI = block.weight(name)
        new[name] = w_OI * s_I.to(w_OI.device)
    plain: dict[str, Stored] = {}
    run = block.module.get_parameter(s.producer.weight).dtype
    for name in (n for n in new if n not in s.late):
        weight = weights[logical(name, weights)]
        dtype = _DTYPES[weight.parts["codes"].dtype]
        if run not in (dtype, torch.float32):
            return f"{name} is stored as {dtype}, and the run has it as {run}"
        rounded = new[name].to(dtype)
        if not torch.equal(rounded.float(), new[name]):
            return f"{name} cannot carry the scales without error"
        plain[weight.name] = _stored(rounded, weight)
    for name, w in new.items():
        block.replace(name, w)
    done.tensors |= plain
    done.changed.update(logical(n, weights) for n in new)
    error = found.loss / (found.loss_plain or 1.0)
    done.facts |= {n: {"into": s.module, "exponent": found.exponent, "error": error} for n in s.calibrated}
    return None


def _norm(
    block: Block, s: SmoothingSet, s_I: Tensor, weights: Mapping[str, Weight]
) -> tuple[dict[str, Tensor], Tensor] | str:
    """(a norm's new tensors, the scales it really applies), checked on random tokens."""
    norm_I = block.weight(s.module)
    dtype = _DTYPES[weights[logical(s.module, weights)].parts["codes"].dtype]
    folded_I, exact_I = awq.fold_norm(norm_I, s_I, dtype=dtype)
    new = {s.module: folded_I.float()}
    old = {"weight": norm_I}
    named = {"weight": new[s.module]}
    if s.bias:
        old["bias"] = block.weight(s.bias)
        new[s.bias] = named["bias"] = old["bias"] / exact_I
    module = block.module.get_submodule(s.producer.weight.rpartition(".")[0])
    x_TI = torch.randn(PROBES, len(norm_I), generator=torch.Generator().manual_seed(0)).to(norm_I.device)
    before_TI = torch.func.functional_call(module, old, (x_TI,))
    after_TI = torch.func.functional_call(module, named, (x_TI,)) * exact_I
    if not float((after_TI - before_TI).abs().max()) <= CLOSE * float(before_TI.abs().max()):
        return f"{s.module} does not scale its output by its weight"
    return new, exact_I


def _rows(block: Block, s: SmoothingSet, s_I: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """(a projection's new tensors, the scales)."""
    rows_I = s.producer.rows(len(s_I))
    s_R = torch.ones(int(rows_I.max()) + 1)
    s_R[rows_I] = s_I
    here = slice(s.first, s.first + len(s_R))
    w_OI = block.weight(s.module).clone()
    bias_O = None if s.bias is None else block.weight(s.bias).clone()
    rows, bias = awq.fold_rows(w_OI[here], None if bias_O is None else bias_O[here], s_R)
    w_OI[here] = rows
    new = {s.module: w_OI}
    if s.bias is not None and bias_O is not None and bias is not None:
        bias_O[here] = bias
        new[s.bias] = bias_O
    return new, s_I


def _stored(x: Tensor, weight: Weight) -> Stored:
    """A tensor in the dtype and with the shape of the source's."""
    bits = x.cpu().contiguous()
    array = bits.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else bits.numpy()
    return weight.parts["codes"].dtype, weight.shape, array
