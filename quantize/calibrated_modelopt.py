"""Hand the layers of a block to ModelOpt: their weights, and the inputs that the block shows when all samples run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from quantkit.calibrate.activations import Activations
from quantkit.calibrate.block import Block
from quantkit.calibrate.stats import finite_rows
from quantkit.quantize.methods import modelopt
from quantkit.quantize.plan import Step, Task
from quantkit.quantize.recipe_method import Method
from torch import Tensor


def modelopt_layers(step: Step) -> list[Task]:
    """The tasks of a step whose codes ModelOpt is to choose."""
    return [t for t in step.tasks if t.fate == "quantize" and t.method == "modelopt"]


def ask_modelopt(
    block: Block, states: Activations, steps: Iterable[Step], sets: Sequence[tuple[str, ...]],
    methods: dict[str, Method],
) -> dict[str, modelopt.Found]:  # fmt: skip
    """What each layer's algorithm finds; layers with one algorithm share its runs of all samples. The block stays.

    sets  layers with one input each that are shown; a step's layers are in one of them
    """
    wanted: dict[str, dict[str, modelopt.Layer]] = {}
    fused: list[list[str]] = []
    for step in steps:
        tasks = modelopt_layers(step)
        weights = {t.name: block.weight(t.name) for t in tasks}
        amax = max((float(w.abs().max()) for w in weights.values()), default=0.0)
        for task in tasks:
            assert task.scheme is not None
            layer = modelopt.Layer(weights[task.name], task.scheme, amax)
            wanted.setdefault(methods[task.name].algorithm or "", {})[task.name] = layer
        shared = [t.name for t in tasks if t.scheme is not None and t.scheme.granularity == "tensor"]
        fused += [shared] if len(shared) > 1 else []
    found: dict[str, modelopt.Found] = {}
    for algorithm, layers in wanted.items():

        def feed(show: modelopt.Show) -> None:
            for _ in block.show_all(states, _Shown(show), sets):
                pass

        found |= modelopt.calibrated(layers, algorithm, feed)
    for names in fused:  # one scale for what an engine fuses: no weight may be beyond it
        largest = torch.stack([found[n].amax for n in names]).amax()
        found |= {n: replace(found[n], amax=largest) for n in names}
    return found


class _Shown:
    """An observer that passes on the inputs of linear layers, rows with NaN or infinity left out."""

    def __init__(self, show: modelopt.Show) -> None:
        self._show: Callable[[str, Tensor], None] = show

    def linear(self, modules: Sequence[str], x_TI: Tensor) -> None:
        """Inputs of one set of layers."""
        x_TI, _ = finite_rows(x_TI.float())
        for name in modules if len(x_TI) else ():
            self._show(name, x_TI)

    def kv(self, layer: int, q_TQD: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
        """Keys and values do not matter here."""

    def latent(self, layer: int, row_TC: Tensor) -> None:
        """Nor do rows of an MLA cache."""
