"""A calibration run, block by block: load, watch, choose codes, run again with what will be served, free.

All samples go through a block in step: when the inputs of a layer are known for every one, its codes are chosen, the
unpacked result takes the weight's place, and the layers behind it see what the served model will give them. Where
experts are calibrated, which not every sample comes to, one run shows all inputs in the block as it was, and a second
one, of the block as it will be served, gives the states that enter the next. Keys and values, and the ranges of
activations that will be quantised, are measured as they will be served. A block's results are on the disk before the
next one begins.

Letters: T tokens, I inputs, O outputs, N samples, L tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from quantkit.calibrate.activations import Activations, State
from quantkit.calibrate.block import Block
from quantkit.calibrate.block_stages import stages
from quantkit.calibrate.blocks import BlockModel, open_model
from quantkit.calibrate.kv import KVStats, rope_of
from quantkit.calibrate.mtp import FAMILIES
from quantkit.calibrate.watch import Watch
from quantkit.export.checkpoint import Reader, text_config
from quantkit.kernels.errors import QuantkitError, join_errors
from quantkit.quantize.calibrated import Chosen, Factors, choose_codes, fused_tensors
from quantkit.quantize.calibrated_modelopt import ask_modelopt, modelopt_layers
from quantkit.quantize.decoded import DecodedWeights
from quantkit.quantize.input_scales import block_scales, measured_sets, measured_tasks
from quantkit.quantize.plan import Plan, Step, Task
from quantkit.quantize.recipe_method import CALIBRATED, Method
from quantkit.quantize.run_folder import RunFolder, Stored, write_tensors
from quantkit.quantize.smoothing import smooth
from quantkit.quantize.waves import in_waves

BATCH_TOKENS = 2048  # of samples that are run together


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run is carried out. Of all this only `dtype` shows in the result.

    memory  bytes for hidden states, and as many for Hessians; more goes to files, or is gathered in several passes
    dtype   of weights and hidden states; statistics are float32 and up
    """

    memory: int
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    trust_remote_code: bool = False


def wanted_steps(plan: Plan) -> list[Step]:
    """The steps of a plan whose codes a calibration run chooses: sets of layers that share a scale stay together."""
    return [s for s in plan.steps if any(t.fate == "quantize" and t.method in CALIBRATED for t in s.tasks)]


def calibrate(
    plan: Plan, ids_NL: NDArray[np.int32], folder: RunFolder, settings: Settings,
    advance: Callable[[int], None] = lambda tokens: None,
) -> None:  # fmt: skip
    """Run every block that the folder has not finished; `advance` is called with the tokens of each run."""
    with Reader() as reader, ExitStack() as stack:
        weights = DecodedWeights(plan.source, reader)
        model = open_model(
            plan.source.folder, weights, dtype=settings.dtype, device=settings.device,
            trust_remote_code=settings.trust_remote_code, scratch=folder.folder, mtp=asks_mtp(plan),
        )  # fmt: skip
        steps = steps_of_blocks(plan, model)
        batch = max(1, BATCH_TOKENS // ids_NL.shape[1])
        ids = torch.split(torch.from_numpy(ids_NL).long(), batch)
        states = stack.enter_context(_states(model, ids, folder, settings))
        for index in range(len(folder.done), model.num_blocks):
            if index == model.mtp:
                model.enter_mtp(states, ids)
            with model.block(index, memory=settings.memory) as block:
                facts = _run_block(block, steps[index], states, plan, folder, settings, advance)
            states.save(folder.activations(index))
            folder.finished(index, facts)


def steps_of_blocks(plan: Plan, model: BlockModel) -> list[list[Step]]:
    """The wanted steps of each block; raises QuantkitError for layers that a forward pass never reaches."""
    found: list[list[Step]] = [[] for _ in range(model.num_blocks)]
    blocks = model.blocks_of_tensors()
    strange = [_unreachable(t) for t in measured_tasks(plan).values() if _block_of(t, plan, blocks) is None]
    for step in wanted_steps(plan):
        block = _block_of(step.tasks[0], plan, blocks)
        if block is None:
            strange.append(_unreachable(step.tasks[0]))
        else:
            found[block].append(step)
    if strange:
        raise join_errors("the recipe cannot be carried out", strange)
    return found


def asks_mtp(plan: Plan) -> bool:
    """Whether a rule asks for what only a run of the MTP layer shows."""
    asked = [*(t for s in wanted_steps(plan) for t in s.tasks), *measured_tasks(plan).values()]
    return any(t.role.startswith("mtp.") for t in asked)


def _block_of(task: Task, plan: Plan, blocks: Mapping[str, int]) -> int | None:
    """The block that a layer is in; None when none runs it, or when it is a part of a matrix in fused experts."""
    whole = len(task.weight.shape) == 2 or plan.format == "mxfp4"
    return blocks.get(task.weight.name) if whole else None


def _unreachable(task: Task) -> QuantkitError:
    mtp = f" (of MTP layers those of {', '.join(FAMILIES)} are run, but for their heads)"
    return QuantkitError(
        "a layer that a forward pass does not reach cannot be calibrated",
        tensor=task.name,
        hint="give it a data-free method and no measured input scale, or keep it"
        + (mtp if task.role.startswith("mtp.") else ""),
    )


@contextmanager
def _states(
    model: BlockModel, ids: Sequence[torch.Tensor], folder: RunFolder, settings: Settings
) -> Iterator[Activations]:
    """What left the last finished block, or the embedding: one state for each [N, L] of `ids`."""
    finished = len(folder.done)
    if finished:
        states = Activations.load(folder.activations(finished - 1), memory=settings.memory, folder=folder.folder)
    else:
        states = Activations(memory=settings.memory, folder=folder.folder)
        with model.embeddings():
            for ids_NL in ids:
                states.append(model.start(ids_NL))
    with states:
        yield states


def _run_block(
    block: Block, steps: Sequence[Step], states: Activations, plan: Plan, folder: RunFolder, settings: Settings,
    advance: Callable[[int], None],
) -> dict[str, Any]:  # fmt: skip
    """Choose the codes of a block's layers, and take every state through the block as it will be served."""
    methods = methods_by_layer(plan, steps)
    tasks = {t.name: t for s in steps for t in s.tasks if t.name in methods}
    smoothed = smooth(block, states, plan, tasks, settings.memory, settings.device, lambda _: advance(0))
    wanted = plan.recipe.kv_cache is not None
    text = text_config(plan.source.config)
    stats = KVStats(rope_of(text), text.get("kv_lora_rank")) if wanted else None
    length = int(states[0].hidden.shape[1])
    measured = measured_tasks(plan)
    inputs = measured_sets(block, measured)
    sampled = {*(t.name for s in steps for t in s.tasks), *measured}
    sets = [names for names in block.linears() if any(s.tasks[0].name in names for s in steps)]
    in_turn = sets and block.comes_to(sets) and not any(modelopt_layers(s) for s in steps)
    watch = Watch(sets if in_turn else (), stats, sampled, length, settings.device, inputs)
    run = _in_turn if in_turn else _at_once
    chosen = run(block, steps, sets, states, watch, plan, methods, settings, advance)
    watch.check_finite()
    for name, facts in smoothed.facts.items():
        chosen.facts[name]["smoothing"] = facts
    stored = smoothed.tensors | chosen.tensors
    if stored:
        write_tensors(folder.block_file(block.index), fused_tensors(stored, steps))
    samples = {f"inputs.{n}": x for n, x in watch.samples.items()} | (stats.samples() if stats else {})
    if samples:
        write_tensors(folder.samples_file(block.index), {n: bfloat16(x) for n, x in samples.items()})
    return {
        "layers": dict(sorted(chosen.facts.items())),
        "smoothed": sorted(smoothed.changed),
        "inputs": block_scales(inputs, measured, watch),
        "kv": [layer.to_json() for layer in stats.finish()] if stats else [],
    }


def _in_turn(
    block: Block, steps: Sequence[Step], sets: Sequence[tuple[str, ...]], states: Activations, watch: Watch,
    plan: Plan, methods: dict[str, Method], settings: Settings, advance: Callable[[int], None],
) -> Chosen:  # fmt: skip
    """One run of all states: each layer's codes are chosen on inputs from the layers before it as they are served."""
    chosen = Chosen({}, {}, {})
    tokens = sum(_tokens(s) for s in states)
    for i, names in enumerate(stages(block, states, sets, watch, settings.memory)):
        watch.check_finite()
        hessian, factors = watch.hessian(names, block.shape(names[0])[1]), Factors()
        watch.forget(names)
        for step in (s for s in steps if s.tasks[0].name in names):
            found = choose_codes(step, block, hessian, plan, methods, factors, {})
            for name, w_OI in found.weights.items():
                block.replace(name, w_OI)
            found.weights.clear()
            chosen.add(found)
        advance(tokens * (i + 1) // (len(sets) + 1) - tokens * i // (len(sets) + 1))
    advance(tokens - tokens * len(sets) // (len(sets) + 1))
    return chosen


def _at_once(
    block: Block, steps: Sequence[Step], sets: Sequence[tuple[str, ...]], states: Activations, watch: Watch,
    plan: Plan, methods: dict[str, Method], settings: Settings, advance: Callable[[int], None],
) -> Chosen:  # fmt: skip
    """Two runs and more: all codes are chosen on the block as it was, since its experts come and go."""
    chosen = Chosen({}, {}, {})
    peers = None
    for i, wave in enumerate(_waves(block, steps, sets, settings.memory)):
        shown = Watch(wave, device=settings.device, peers=peers)
        for state in block.show_all(states, shown, wave):
            advance(_tokens(state) // 2 if i == 0 else 0)
        shown.check_finite()
        peers = shown.peers or None
        here = [s for s in steps if any(s.tasks[0].name in names for names in wave)]
        foreign = ask_modelopt(block, states, here, wave, methods)
        for names in wave:
            hessian, factors = shown.hessian(names, block.shape(names[0])[1]), Factors()
            for step in (s for s in here if s.tasks[0].name in names):
                chosen.add(choose_codes(step, block, hessian, plan, methods, factors, foreign))
    for name, w_OI in chosen.weights.items():  # after all waves: how many there were must not show in the codes
        block.replace(name, w_OI)
    chosen.weights.clear()
    for i, state in block.run_all(states, observe=watch):
        states[i] = state
        advance(_tokens(state) - (_tokens(state) // 2 if sets else 0))
    return chosen


def methods_by_layer(plan: Plan, steps: Sequence[Step]) -> dict[str, Method]:
    """The method and its options of every layer of the steps: those of the first rule that matches it."""
    found = {}
    for task in (t for s in steps for t in s.tasks):
        role = plan.placed[task.weight.name].role
        rule = next(r for r in plan.recipe.weights if r.match.hits(task.weight.name, role))
        if rule.method is not None:
            found[task.name] = rule.method
    return found


def bfloat16(x: torch.Tensor) -> Stored:
    """A bfloat16 tensor as the run folder stores it."""
    return "BF16", tuple(x.shape), x.contiguous().view(torch.uint16).numpy()


def _tokens(state: State) -> int:
    return int(state.hidden.shape[0] * state.hidden.shape[1])


def _waves(
    block: Block, steps: Sequence[Step], sets: Sequence[tuple[str, ...]], memory: int
) -> Iterator[list[tuple[str, ...]]]:
    """Sets of layers with one input each, so many at a time that their Hessians fit into the memory."""
    copied = {t.name for s in steps for t in modelopt_layers(s)}  # with Hessians of its own

    def size(names: tuple[str, ...]) -> int:
        inputs = block.shape(names[0])[1]
        copies = sum(4 * (block.shape(n)[0] + inputs) * inputs for n in copied.intersection(names))
        return 4 * inputs**2 + copies

    return in_waves(sets, size, memory)
