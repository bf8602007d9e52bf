"""Tables for people, on stderr by way of rich: plain text when it is not a terminal, no colour under NO_COLOR."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from quantkit.quantize.plan import Plan
    from quantkit.quantize.run import Summary


def _console() -> Console:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160
    return console


def size(n: float) -> str:
    """Bytes in GB and GiB, or in MB below 0.1 GB."""
    return f"{n / 1e9:.3f} GB ({n / 2**30:.2f} GiB)" if n >= 1e8 else f"{n / 1e6:.2f} MB"


def _table(*columns: str, right: int = 99) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i >= right else "left", no_wrap=True)
    return table


def _ranges(numbers: list[str]) -> str:
    return ", ".join(numbers) or "none"


def plan(plan: Plan, facts: dict[str, Any]) -> None:
    """The whole plan."""
    console = _console()
    console.print(f"{plan.source.folder}  family {facts['family']}  recipe {facts['recipe']}  format {facts['format']}")
    for assumption in facts["assumptions"]:
        console.print(f"  {assumption}")
    table = _table("role", "fate", "scheme", "layers", "in MB", "out MB", "bits/weight", right=3)
    for row in facts["fates"]:
        bits = 8 * row["bytes_out"] / row["parameters"] if row["parameters"] else 0
        scheme = (
            row["scheme"]
            + (f" {row['method']}" if row["method"] else "")
            + (f" ({row['reason']})" if row["reason"] else "")
        )
        table.add_row(
            row["role"],
            row["fate"],
            scheme,
            f"{row['layers']:,}",
            f"{row['bytes_in'] / 1e6:,.2f}",
            f"{row['bytes_out'] / 1e6:,.2f}",
            f"{bits:.2f}",
        )
    console.print(table)
    console.print(f"in      {size(facts['bytes_in'])}, {facts['tensors_in']:,} tensors")
    console.print(
        f"out     {size(facts['bytes_out'])}, {facts['tensors_out']:,} tensors, {facts['shards']} shards, "
        f"{facts['bits_per_weight']:.2f} bits per weight"
    )
    console.print(f"needs   {size(facts['disk_bytes'])} of disk, {size(facts['memory_bytes'])} of memory at most")
    console.print(f"TP      loads: {_ranges([n for n, why in facts['tp'].items() if why == 'loads'])}")
    for n, why in facts["tp"].items():
        if why != "loads":
            console.print(f"        {n} will not load: {why}")


def plan_line(plan: Plan, facts: dict[str, Any]) -> None:
    """The plan in two lines, before a run."""
    console = _console()
    schemes = sorted({t.scheme.name for t in plan.tasks if t.scheme})
    console.print(
        f"{plan.source.folder} -> {', '.join(schemes) or 'as published'} in the format {plan.format}: "
        f"{size(facts['bytes_in'])} to {size(facts['bytes_out'])}, {facts['bits_per_weight']:.2f} bits per weight"
    )
    for assumption in facts["assumptions"]:
        console.print(f"  {assumption}")


def summary(plan: Plan, summary: Summary, out: Path, peak: int) -> None:
    """What a run did."""
    console = _console()
    if summary.seconds == 0.0 and summary.resumed:
        console.print(f"{out} is finished already: nothing to do")
        return
    seconds = f"{summary.seconds:.1f} s"
    if summary.resumed:  # a rate would count what an earlier run has done
        how = f"{summary.resumed} of {len(plan.steps)} steps were there already"
    else:
        how = f"{summary.bytes_in / max(summary.seconds, 1e-9) / 1e9:.2f} GB/s"
    console.print(
        f"wrote {summary.bytes_out / 1e9:.3f} GB from {summary.bytes_in / 1e9:.3f} GB in {seconds} "
        f"({how}, peak memory {peak / 1e9:.2f} GB)"
    )
    console.print(f"  {out}")


def report(report: Any) -> None:
    """The verifier's result: each check with its verdict, the worst layers, the first failures."""
    console = _console()
    for check in report.checks:
        verdict = "ok  " if check.passed else "FAIL"
        console.print(f"{verdict} {check.name}: {check.value}")
        for failure in check.failures[:10]:
            console.print(f"       {failure}")
        if len(check.failures) > 10:
            console.print(f"       ... and {len(check.failures) - 10} more")
    if report.worst:
        table = _table("worst layers", "scheme", "relative error", "bound", "SQNR dB", "output error", right=2)
        for layer in report.worst:
            numbers = (f"{layer.error:.5f}", f"{layer.bound:.5f}", f"{layer.sqnr:.2f}", f"{layer.output_error:.5f}")
            table.add_row(layer.name, layer.scheme, *numbers)
        console.print(table)
    console.print(f"{'verified' if report.passed else 'FAILED'}: {report.folder} in {report.seconds:.1f} s")


def calibration(out: Path, facts: dict[str, Any]) -> None:
    """What a calibration run found: coverage, the layers that lost most, the scales of the cache."""
    console = _console()
    text = facts["text"]
    n, length = text["samples"]
    console.print(f"{out}: {n} samples of {length} tokens from {text['origin']}, digest {text['digest'][:12]}")
    layers = facts["layers"]
    if layers:
        better = [f["loss"] / f["loss_data_free"] for f in layers.values() if f["loss_data_free"]]
        better.sort()
        middle = better[len(better) // 2] if better else 1.0
        console.print(
            f"{len(layers)} layers calibrated; output error of the middle one {middle:.2f} of data-free rounding's"
        )
        counts = {c: sum(f["coverage"] == c for f in layers.values()) for c in ("low", "none")}
        back = [n for n, f in layers.items() if f["fallback"]]
        if any(counts.values()) or back:
            console.print(
                f"coverage: {counts['low']} low, {counts['none']} none; {len(back)} layers rounded without calibration"
            )
        table = _table("layers with the largest output error", "scheme", "loss", "data-free", "tokens", "damp", right=2)
        worst = sorted(layers.items(), key=lambda f: -f[1]["loss"])[:5]
        for name, f in worst:
            numbers = (f"{f['loss']:.5f}", f"{f['loss_data_free']:.5f}", f"{f['tokens']:,}", f"{f['damp']:.2f}")
            table.add_row(name, f["scheme"], *numbers)
        console.print(table)
    if inputs := facts["input_scales"].values():
        amax = [f["amax"] for f in inputs]
        worst = [max(f[share] for f in inputs) for share in ("saturated", "underflow")]
        console.print(
            f"activations of {len(inputs)} layers: amax {min(amax):.4g} to {max(amax):.4g}, "
            f"{sum(f['source'] == 'peer' for f in inputs)} from peers; largest share of blocks clipped {worst[0]:.2g}, "
            f"under the normal range {worst[1]:.2g}"
        )
    if facts["kv_scales"]:
        scales = facts["kv_scales"].values()
        ranges = [(min(s[p] for s in scales), max(s[p] for s in scales)) for p in "kv"]
        clipped = max(max(s["clipped"].values()) for s in scales)
        console.print(
            f"KV cache: k_scale {ranges[0][0]:.4g} to {ranges[0][1]:.4g}, v_scale {ranges[1][0]:.4g} to "
            f"{ranges[1][1]:.4g} in {len(scales)} layers; largest share clipped {clipped:.2g}"
        )
    console.print(f"done in {facts['seconds']:.1f} s, peak memory {facts['peak_memory_bytes'] / 1e9:.2f} GB")


def evaluation(facts: dict[str, Any]) -> None:
    """Scores of a checkpoint beside its source."""
    console = _console()
    console.print(f"{facts['checkpoint']}{' with an FP8 KV cache' if facts['kv'] else ''} on {facts['text']}")
    table = _table("", "perplexity", "KL", "top-1", right=1)
    table.add_row("source", f"{facts['perplexity_source']:.4f}", "0", "100 %")
    numbers = (f"{facts['perplexity_candidate']:.4f}", f"{facts['kl']:.5f}", f"{100 * facts['top1']:.2f} %")
    table.add_row("checkpoint", *numbers)
    console.print(table)
    if facts["activations"]:
        asked = ", ".join(f"{title} in {n} layers" for title, n in facts["activations"].items())
        how = "left out, only weights" if facts["weights_only"] else "as served"
        console.print(f"activations {how}: {asked}")
    if facts["kv_layers"]:
        console.print(_cache_errors(facts["kv_layers"]))
        console.print(
            f"attention outputs under the FP8 cache: relative squared error {facts['kv_error']:.2e} in the mean of "
            f"{len(facts['kv_layers'])} layers ({facts['kv_error_at_one']:.2e} under scale 1.0), largest share clipped "
            f"{facts['kv_clipped']:.2g}"
        )
    for gate in facts["gates"]:
        verdict = "ok  " if gate["passed"] else "FAIL"
        console.print(f"{verdict} {gate['metric']} {gate['value']:.5g}, bound {gate['bound']:g}")
    console.print(f"{facts['tokens']:,} tokens in {facts['seconds']:.1f} s")


def _cache_errors(layers: list[dict[str, Any]]) -> Table:
    """The layers whose attention the FP8 cache changes most."""
    columns = ("worst layers", "k_scale", "v_scale", "error", "under 1.0", "K clipped", "V clipped", "under 1.0")
    table = _table(*columns, right=1)
    for x in sorted(layers, key=lambda x: -x["error"])[:5]:
        scales, errors = (
            (f"{x[k]:.4g}" for k in ("k_scale", "v_scale")),
            (f"{x[k]:.2e}" for k in ("error", "error_at_one")),
        )
        clipped = (f"{x[k]:.2g}" for k in ("k_clipped", "v_clipped", "clipped_at_one"))
        table.add_row(f"layer {x['layer']}", *scales, *errors, *clipped)
    return table


def inspection(facts: dict[str, Any]) -> None:
    """What a checkpoint is."""
    console = _console()
    method = f", {facts['quant_method']} {facts['quant_format'] or ''}" if facts["quant_method"] else ", not quantised"
    console.print(f"{facts['folder']}  family {facts['family']}  {' '.join(facts['architectures'])}{method}")
    for assumption in facts["assumptions"]:
        console.print(f"  {assumption}")
    table = _table("role", "stored as", "tensors", "parameters", "MB", "example", right=2)
    table.columns[-1].justify = "left"
    for row in facts["stored"]:
        table.add_row(
            row["role"],
            row["stored"],
            f"{row['tensors']:,}",
            f"{row['parameters']:,}",
            f"{row['bytes'] / 1e6:,.2f}",
            row["example"],
        )
    console.print(table)
    console.print(
        f"{size(facts['bytes'])}, {facts['tensors']:,} tensors in {facts['files']} files, "
        f"{facts['parameters']:,} parameters, {facts['bits_per_weight']:.2f} bits per weight"
    )
