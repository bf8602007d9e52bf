"""Verify a checkpoint: alone, or weight by weight against the source it was made from.

With the source, every layer is decoded from the bytes on the disk and compared. Four things have to hold:
- kept tensors, and codes that were passed through, equal the source's bytes;
- each code is the nearest one to its source weight under the scale that is stored beside it;
- the layer's error, as its method weighs it, is at most that of the plainest rounding in the same scheme (absolute
  maximum, no search);
- the packed kernel, run on those bytes, gives what the decoded weights give.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.export.checkpoint import Checkpoint, Reader, has_fp8_kv, open_folder
from quantkit.export.safetensors_file import TensorInfo
from quantkit.export.sources.detect import Weight, weights_of
from quantkit.export.verify import (
    Check,
    check_config,
    check_files,
    check_fused,
    check_kv_json,
    check_scales,
    manifest_of,
)
from quantkit.export.verify_inputs import check_input_scales
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.measure import relative_error, sqnr_db
from quantkit.quantize.compare import Compared, compare
from quantkit.quantize.kernel_run import KernelRun, run_kernel
from quantkit.quantize.kv_run import KVRun, kv_runs, stored_scales
from quantkit.quantize.overlay import WEIGHTS, overlaid
from quantkit.quantize.pairs import Pair, pairs_of, tail_sets
from quantkit.quantize.recorded import inputs_from, recorded_tensors
from quantkit.quantize.roles import Placed, roles_of, shared_inputs
from quantkit.quantize.run_folder import measured_scales

# A searched scale is never worse than the plain one in the loss of its method. Left is the rounding of sums: 1e-5,
# extreme weights 1e-3.
TOLERANCE = 1.001
WORST = 10


@dataclass(frozen=True, slots=True)
class LayerError:
    """A quantised layer: relative error ||w - w_hat|| / ||w||, the bound it has to keep, the SQNR in dB.

    All three are in the norm that the method makes small: `tails` has weights in it.

    output_error  of the packed kernel's outputs, relative, against the source weight's; NaN without a kernel
    """

    name: str
    scheme: str
    error: float
    bound: float
    sqnr: float
    output_error: float


@dataclass(frozen=True, slots=True)
class Report:
    """What was checked, with what result."""

    folder: str
    checks: tuple[Check, ...]
    layers: tuple[LayerError, ...]
    kv: tuple[KVRun, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """No check failed."""
        return all(c.passed for c in self.checks)

    @property
    def worst(self) -> tuple[LayerError, ...]:
        """The layers with the largest relative error."""
        return tuple(sorted(self.layers, key=lambda e: -e.error)[:WORST])

    def as_json(self) -> dict[str, Any]:
        """Every check and layer with value, bound and verdict."""
        return {
            "folder": self.folder,
            "passed": self.passed,
            "seconds": self.seconds,
            "checks": [
                {"name": c.name, "value": c.value, "passed": c.passed, "failures": list(c.failures)}
                for c in self.checks
            ],
            "layers": [
                {
                    "name": e.name,
                    "scheme": e.scheme,
                    "relative_error": e.error,
                    "bound": e.bound if math.isfinite(e.bound) else None,
                    "sqnr_db": e.sqnr if math.isfinite(e.sqnr) else None,
                    "output_error": e.output_error if math.isfinite(e.output_error) else None,
                    "passed": e.error <= e.bound * TOLERANCE,
                }
                for e in self.layers
            ],
            "kv": [_kv_json(r) for r in self.kv],
        }


def _kv_json(run: KVRun) -> dict[str, Any]:
    """JSON has no infinity."""
    facts = {n: v if math.isfinite(v) else None for n, v in asdict(run).items()}
    return {**facts, "passed": run.error <= run.bound}


def verify_checkpoint(
    folder: Path,
    source: Checkpoint | None,
    *,
    run: Path | None = None,
    jobs: int = 1,
    advance: Callable[[int], None] = lambda _: None,
    begun: float | None = None,
) -> Report:
    """Check a folder; faults of the checkpoint become failed checks, never exceptions.

    run  folder of a calibration run: kernels then work on what it recorded, and attention runs on the keys and values
         where the checkpoint asks for an FP8 cache
    """
    recorded = recorded_tensors(run) if run else {}
    begun = time.monotonic() if begun is None else begun
    layers: list[LayerError] = []
    try:
        checkpoint = open_folder(folder)
        weights = weights_of(checkpoint)
    except QuantkitError as e:
        checks = [Check("headers, index and companions can be read", "no", (str(e).replace("\n", "; "),))]
        return Report(str(folder), tuple(checks), (), (), time.monotonic() - begun)
    manifest = manifest_of(folder)
    placed, _ = roles_of({n: w.shape for n, w in weights.items()}, checkpoint.config)
    fused = {n: p.fused for n, p in placed.items() if p.fused is not None and n in weights}
    with Reader() as reader:
        checks = check_files(checkpoint, manifest)
        checks.append(check_scales(weights, reader))
        checks.append(check_fused(weights, fused, reader))
        checks += check_input_scales(checkpoint, weights, shared_inputs(placed), reader, measured_scales(run))
        ours = manifest is not None and manifest.get("format") != "as published"
        checks.append(check_config(checkpoint, weights, linear_weights(weights, placed), ours=ours))
        if source is not None:
            more, layers = _against_source(weights, fused, source, run, manifest, recorded, reader, jobs, advance)
            checks += more
        checks += check_kv_json(folder, checkpoint.config)
        scales = stored_scales(weights, placed, reader)
        fp8_cache = has_fp8_kv(checkpoint.config) or bool(scales)
        kv = kv_runs(recorded, scales, checkpoint.config, reader) if fp8_cache else []
    checks += _kv_check(kv)
    return Report(str(folder), tuple(checks), tuple(layers), tuple(kv), time.monotonic() - begun)


def linear_weights(weights: Mapping[str, Weight], placed: Mapping[str, Placed]) -> list[str]:
    """Names of the 2-D weights of linear layers: embeddings and norms left out."""
    matrices = [n for n, w in weights.items() if n.endswith(".weight") and len(w.shape) == 2]
    return [n for n in matrices if placed[n].role.removeprefix("mtp.") not in ("embedding", "norm")]


def _against_source(
    weights: Mapping[str, Weight], fused: Mapping[str, str], source: Checkpoint, run: Path | None,
    manifest: Mapping[str, Any] | None, recorded: Mapping[str, TensorInfo], reader: Reader, jobs: int,
    advance: Callable[[int], None],
) -> tuple[list[Check], list[LayerError]]:  # fmt: skip
    """Compare every weight of the source with what became of it.

    What a calibration run has chosen is compared, bit for bit, with that run; without its folder only the kernels run
    on those layers, whose codes are not the nearest ones. Of weights with scaled channels no distance is given.
    """
    dropped = set((manifest or {}).get("dropped") or {})
    ours = set((manifest or {}).get("calibrated") or ())
    smoothed = frozenset((manifest or {}).get("smoothed") or ())
    published = weights_of(source)
    chosen = published
    if run is not None and (run / WEIGHTS).is_dir():
        chosen = weights_of(overlaid(source, run))
        ours = {n for n in ours if n.endswith(("k_scale", "v_scale"))}
    pairs, missing, strange = pairs_of(chosen, weights, dropped)
    tails = tail_sets(pairs, (manifest or {}).get("layers") or {}, fused)
    lost = tuple(f"{n}: is in the source, nothing of it in the checkpoint" for n in missing)
    added = tuple(f"{n}: is not in the source" for n in strange if n not in ours)
    known = f"{len(pairs)} weights, {len(dropped)} dropped by a rule"
    known += f", {len(ours)} from a calibration run" if ours else ""
    checks = [Check("every tensor of the source is accounted for", known, lost + added)]
    inputs_of = inputs_from(recorded, reader)
    originals = pairs if chosen is published else pairs_of(published, weights, dropped)[0]
    originals_of: dict[tuple[str, int | None], list[Pair]] = {}
    for p in originals:  # a fused tensor may be one pair with the run, and one an expert with the published weights
        for expert in {p.out_expert, None}:
            originals_of.setdefault((p.output.name, expert), []).append(p)

    def work(pair: Pair) -> tuple[Compared | None, list[KernelRun]]:
        found = originals_of.get((pair.output.name, pair.out_expert), [])
        ran = [r for p in found if (r := run_kernel(p, inputs_of, reader)) is not None]
        compared = None if pair.output.name in ours else compare(pair, reader, tails.get(pair.output.name, ()))
        advance(pair.nbytes)
        return compared, ran

    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(work, pairs))
    compared = [c for c, _ in results if c is not None]
    layers = [_layer(c, [] if c.name in smoothed else r) for c, r in results if c is not None and c.scheme]
    verdicts = _verdicts(compared, layers)
    runs = [r for _, ran in results for r in ran]
    ours_alone = [r for c, ran in results if not (c and c.scheme) for r in ran]
    given = [r for r in ours_alone if r.sq_w_err and r.name not in smoothed]
    return [*checks, *verdicts, *_kernel_check(runs)], layers + [_given(r) for r in given]


def _given(run: KernelRun) -> LayerError:
    """A layer whose codes were chosen elsewhere: by a calibration run. No bound holds for its weights."""
    error = relative_error(run.sq_w_err, run.sq_w_norm)
    outputs = relative_error(run.sq_err, run.sq_norm)
    return LayerError(run.name, run.scheme, error, math.inf, sqnr_db(error), outputs)


def _layer(c: Compared, runs: Sequence[KernelRun]) -> LayerError:
    error = relative_error(c.sq_err, c.sq_norm)
    outputs = relative_error(runs[0].sq_err, runs[0].sq_norm) if runs else math.nan
    return LayerError(c.name, c.scheme, error, relative_error(c.sq_plain, c.sq_norm), sqnr_db(error), outputs)


def _kernel_check(runs: Sequence[KernelRun]) -> list[Check]:
    """The packed kernels: one check for all layers that have one."""
    if not runs:
        return []
    seen = sum(r.recorded for r in runs)
    where = f"random inputs{f', recorded ones for {seen}' if seen else ''}"
    return [
        Check(
            "the packed kernels agree with the decoded weights",
            f"{sum(r.count for r in runs)} outputs of {len(runs)} layers on {where}",
            tuple(f"{r.name}: {r.off} of {r.count} outputs differ" for r in runs if r.off),
        )
    ]


def _kv_check(runs: Sequence[KVRun]) -> list[Check]:
    """Attention over an FP8 cache: one check for all layers that were recorded."""
    if not runs:
        return []
    errors, ones = [r.error for r in runs], [r.error_at_one for r in runs]
    return [
        Check(
            "attention over an FP8 cache with the stored scales is that over BF16",
            f"relative error {min(errors):.4f} to {max(errors):.4f} in {len(runs)} layers on recorded keys and values; "
            f"with scale 1.0 {min(ones):.4f} to {max(ones):.4f}",
            tuple(
                f"layer {r.layer}: relative error {r.error:.4f}, bound {r.bound:.4f}, k_scale {r.k_scale:.3g}, "
                f"v_scale {r.v_scale:.3g}, {r.clipped:.2%} clipped"
                for r in runs
                if not r.error <= r.bound
            ),
        )
    ]


def _verdicts(results: Sequence[Compared], over: Sequence[LayerError]) -> list[Check]:
    """The checks that follow from all comparisons; `over` are the errors of the quantised layers."""
    copies = [r for r in results if not r.scheme]
    layers = [r for r in results if r.scheme]
    checks = [
        Check(
            "kept tensors and passed codes equal the source, bit for bit",
            f"{len(copies)} tensors",
            tuple(f"{r.name}: {r.differing} of {r.count} values differ" for r in copies if r.differing),
        )
    ]
    if layers:
        codes = sum(r.count for r in layers)
        checks.append(
            Check(
                "every code is the nearest to its weight under the stored scale",
                f"{codes} codes in {len(layers)} layers",
                tuple(f"{r.name}: {r.differing} of {r.count} codes differ" for r in layers if r.differing),
            )
        )
        checks.append(
            Check(
                "no layer is worse than plain rounding in its scheme",
                f"relative error {min(e.error for e in over):.4f} to {max(e.error for e in over):.4f}",
                tuple(
                    f"{e.name}: relative error {e.error:.5f}, bound {e.bound:.5f}"
                    for e in over
                    if not e.error <= e.bound * TOLERANCE
                ),
            )
        )
    return checks
