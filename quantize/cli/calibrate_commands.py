"""What `quantkit calibrate` and `quantkit evaluate` do: read the arguments, call the library, show the result."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.export.checkpoint import open_checkpoint, text_config
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.cli import show
from quantkit.quantize.cli.commands import emit, load_plan, parse_bytes, peak_memory
from quantkit.quantize.cli.process import settle

if TYPE_CHECKING:
    from quantkit.calibrate.kv_errors import LayerError

METRICS = ("kl", "perplexity_ratio", "top1")
KV_METRICS = ("kv_error", "kv_clipped")


def ready() -> None:
    """Get the process ready to run a model, before torch is imported; raise QuantkitError when something is missing."""
    missing = [name for name in ("torch", "transformers", "safetensors", "greenlet") if find_spec(name) is None]
    if missing:
        raise QuantkitError(
            "running a model needs more than quantising it", value=f"not installed: {', '.join(missing)}",
            hint="pip install 'quantkit[calibrate]'",
        )  # fmt: skip
    settle()


def text_source(text: str | None, dataset: str | None) -> str | None:
    """The one source of text of a command line; None is the text that ships with the package."""
    if text is not None and dataset is not None:
        raise QuantkitError("two sources of text", value=f"--text {text} --dataset {dataset}", allowed="one of them")
    if text is not None and not Path(text).exists():
        raise QuantkitError("no such file", file=text, hint="--dataset is for names of data sets")
    return text if text is not None else dataset


@dataclass(frozen=True, slots=True)
class Reading:
    """The text of a calibration as the command line asks for it; None is what the recipe says."""

    text: str | None = None
    dataset: str | None = None
    samples: int | None = None
    seq_len: int | None = None
    seed: int | None = None
    trust_remote_code: bool = False


def calibrate_command(
    source: str, recipe: str, out: Path, group: str | None, reading: Reading, memory: str, device: str, dtype: str,
    min_expert_tokens: int, as_json: bool,
) -> None:  # fmt: skip
    """`quantkit calibrate`."""
    ready()
    import torch
    from quantkit.calibrate.blocks import fast_dtype
    from quantkit.calibrate.tokens import read_samples
    from quantkit.quantize.calibration import Settings, asks_mtp
    from quantkit.quantize.calibration_run import calibrate_into, check_recipe
    from quantkit.quantize.progress import progress

    budget = parse_bytes(memory)
    plan = load_plan(source, recipe, None, group, ())
    check_recipe(plan)
    wanted = plan.recipe.calibration
    read = read_samples(
        text_source(reading.text, reading.dataset), plan.source.folder, samples=reading.samples or wanted.samples,
        seq_len=reading.seq_len or wanted.seq_len, seed=wanted.seed if reading.seed is None else reading.seed,
        vocab=vocabulary(plan.source.config), trust_remote_code=reading.trust_remote_code,
    )  # fmt: skip
    run_in: torch.dtype = fast_dtype(device) if dtype == "auto" else getattr(torch, dtype)
    settings = Settings(budget, device, run_in, reading.trust_remote_code)
    begun = time.monotonic()
    try:
        layers = int(text_config(plan.source.config)["num_hidden_layers"]) + asks_mtp(plan)
        with progress("calibrate", int(read.ids_NL.size) * layers, unit="tokens") as advance:
            result = calibrate_into(out, plan, read, settings, min_expert_tokens=min_expert_tokens, advance=advance)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: run the same command again to go on\n")
        sys.exit(130)
    facts = {**result, "seconds": time.monotonic() - begun, "peak_memory_bytes": peak_memory()}
    show.calibration(out, facts)
    if as_json:
        emit(facts)


def evaluate_command(
    checkpoint: str, source: str, text: str | None, dataset: str | None, samples: int, seq_len: int,
    gates: Sequence[str], memory: str, device: str, as_json: bool, *, kv: bool, weights_only: bool,
    trust_remote_code: bool,
) -> None:  # fmt: skip
    """`quantkit evaluate`: exit status 1 when a gate is missed."""
    ready()
    from quantkit.calibrate.tokens import read_samples
    from quantkit.quantize.evaluation import compare_checkpoints
    from quantkit.quantize.progress import progress

    limits = parse_gates(gates, kv=kv)
    budget = parse_bytes(memory)
    original, candidate = open_checkpoint(source), open_checkpoint(checkpoint)
    read = read_samples(
        text_source(text, dataset), original.folder, samples=samples, seq_len=seq_len, seed=0,
        vocab=vocabulary(original.config), order="first", trust_remote_code=trust_remote_code,
    )  # fmt: skip
    begun = time.monotonic()
    with progress("evaluate", 0, unit="blocks") as advance:
        found = compare_checkpoints(
            candidate, original, read, kv=kv, weights_only=weights_only, memory=budget, device=device,
            trust_remote_code=trust_remote_code, progress=advance.at,
        )  # fmt: skip
    scores = found.scores
    ratio = scores.perplexity_candidate / scores.perplexity_source
    values = {"kl": scores.kl, "perplexity_ratio": ratio, "top1": scores.top1, **kv_values(found.kv)}
    facts: dict[str, Any] = {
        "checkpoint": checkpoint, "source": source, "text": read.origin, "text_digest": read.digest, "kv": kv,
        **dataclasses.asdict(scores), "perplexity_source": scores.perplexity_source,
        "perplexity_candidate": scores.perplexity_candidate, **values, "activations": dict(found.activations),
        "weights_only": weights_only, "kv_layers": [dataclasses.asdict(layer) for layer in found.kv],
        "gates": [
            {"metric": m, "value": values[m], "bound": b, "passed": passed(m, values[m], b)} for m, b in limits.items()
        ],
        "seconds": time.monotonic() - begun, "peak_memory_bytes": peak_memory(),
    }  # fmt: skip
    show.evaluation(facts)
    if as_json:
        emit(facts)
    if not all(g["passed"] for g in facts["gates"]):
        sys.exit(1)


def kv_values(layers: Sequence[LayerError]) -> dict[str, float]:
    """What the FP8 cache costs over all layers: the mean of their errors and the largest share clipped, of K or V."""
    if not layers:
        return {}
    return {
        "kv_error": statistics.fmean(x.error for x in layers),
        "kv_error_at_one": statistics.fmean(x.error_at_one for x in layers),
        "kv_clipped": max(max(x.k_clipped, x.v_clipped) for x in layers),
    }


def vocabulary(config: dict[str, Any]) -> int:
    """Number of token ids of a model."""
    size = text_config(config).get("vocab_size")
    if not isinstance(size, int):
        raise QuantkitError("config.json does not say how many tokens there are", value=size, allowed="vocab_size")
    return size


def parse_gates(gates: Sequence[str], *, kv: bool) -> dict[str, float]:
    """`kl=0.05` and so on: at least for top1, at most for the others; those of the cache only with `kv`."""
    found = {}
    metrics = METRICS + (KV_METRICS if kv else ())
    for gate in gates:
        metric, _, bound = gate.partition("=")
        try:
            found[metric] = float(bound)
        except ValueError:
            metric = ""
        if metric not in metrics:
            raise QuantkitError(
                "not a gate", value=gate, allowed=", ".join(f"{m}=NUMBER" for m in metrics),
                hint="" if kv else f"{' and '.join(KV_METRICS)} need --kv",
            )  # fmt: skip
    return found


def passed(metric: str, value: float, bound: float) -> bool:
    """Whether a metric keeps its gate; NaN never does."""
    return value >= bound if metric == "top1" else value <= bound
