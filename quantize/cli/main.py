"""The `quantkit` command: tables and progress for people on stderr, data on stdout, exit status 0, 1 or 2.

Nothing heavy is imported here, so that `--help` answers at once: each command imports what it needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.cli import bench
from quantkit.quantize.cli.checkpoints import card, inspect, repair
from quantkit.quantize.cli.options import (
    CORES,
    AsJson,
    CreatePr,
    Dataset,
    Device,
    Dtype,
    Engine,
    Force,
    FormatName,
    GroupSize,
    Jobs,
    Memory,
    OutFolder,
    Private,
    RecipeName,
    RemoteCode,
    Revision,
    Samples,
    Seed,
    SeqLen,
    Source,
    Text,
    TpSizes,
    Twins,
)
from quantkit.quantize.cli.publish import push

app = typer.Typer(
    name="quantkit",
    help="Turn a published language-model checkpoint into one you can serve: INT4, NVFP4, MXFP4, FP8, with proof.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def plan(
    source: Source,
    recipe: RecipeName,
    format: FormatName = None,
    group: GroupSize = None,
    tp: TpSizes = None,
    engine: Twins = None,
    jobs: Jobs = CORES,
    memory: Memory = "512MB",
    json: AsJson = False,
) -> None:
    """Print what a run would do, from headers alone: fates, sizes, memory, and which TP sizes load.

    With --engine also what the engine would do with the output; exit 1 when it refuses it or computes something else.
    """
    from quantkit.quantize.cli.commands import plan_command

    plan_command(source, recipe, format, group, tp or [], engine or [], jobs, memory, json)


@app.command()
def export(
    source: Annotated[str, typer.Argument(metavar="SOURCE|RUN", help="Checkpoint, or folder of a calibration run.")],
    out: OutFolder,
    recipe: Annotated[
        str | None, typer.Option("-r", "--recipe", help="For a SOURCE: a shipped recipe or a .yaml file.")
    ] = None,
    format: FormatName = None,
    group: GroupSize = None,
    tp: TpSizes = None,
    engine: Engine = "vllm",
    kv_per_rank: Annotated[
        bool, typer.Option("--kv-per-rank", help="SGLang's JSON has scales of each rank's heads.")
    ] = False,
    push_to: Annotated[
        str | None, typer.Option("--push-to", metavar="ORG/NAME", help="Publish the finished checkpoint on the Hub.")
    ] = None,
    private: Private = False,
    revision: Revision = None,
    create_pr: CreatePr = False,
    force: Force = False,
    stream_upload: Annotated[
        bool, typer.Option("--stream-upload", help="Send shards while others are written, then remove them here.")
    ] = False,
    jobs: Jobs = CORES,
    memory: Memory = "512MB",
    json: AsJson = False,
) -> None:
    """Write the checkpoint. Running the command again after an interruption goes on where it stopped."""
    from quantkit.quantize.cli.push_command import Destination, export_and_push

    export_and_push(
        source, recipe, out, format, group, tp or [], jobs, memory, json, engine=engine, per_rank=kv_per_rank,
        to=Destination(push_to, private, revision, create_pr, force, stream_upload),
    )  # fmt: skip


@app.command()
def quantize(
    source: Source,
    recipe: RecipeName,
    out: OutFolder,
    format: FormatName = None,
    group: GroupSize = None,
    tp: TpSizes = None,
    engine: Engine = "vllm",
    text: Text = None,
    dataset: Dataset = None,
    samples: Samples = None,
    seq_len: SeqLen = None,
    seed: Seed = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    jobs: Jobs = CORES,
    memory: Annotated[
        str | None, typer.Option("--memory", help="512MB, or 4GB for a recipe that needs calibration, by default.")
    ] = None,
    trust_remote_code: RemoteCode = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Write only, as `export` does.")] = False,
    json: AsJson = False,
) -> None:
    """Write the checkpoint, then verify what is on the disk against the source.

    A recipe that needs calibration is calibrated first, in the run folder OUT.run.
    """
    from quantkit.quantize.cli.calibrate_commands import Reading
    from quantkit.quantize.cli.quantize_command import quantize_command

    reading = Reading(text, dataset, samples, seq_len, seed, trust_remote_code)
    quantize_command(
        source, recipe, out, format, group, tp or [], engine, reading, device, dtype, jobs, memory, json,
        verify=not no_verify,
    )  # fmt: skip


@app.command()
def calibrate(
    source: Source,
    recipe: RecipeName,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="RUN", help="Run folder; an unfinished one goes on.")],
    text: Text = None,
    dataset: Dataset = None,
    samples: Samples = None,
    seq_len: SeqLen = None,
    seed: Seed = None,
    group: GroupSize = None,
    memory: Annotated[str, typer.Option("--memory", help="For hidden states, and as much for Hessians.")] = "4GB",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    min_expert_tokens: Annotated[
        int, typer.Option("--min-expert-tokens", min=0, help="Fail when a routed expert saw fewer.")
    ] = 0,
    trust_remote_code: RemoteCode = False,
    json: AsJson = False,
) -> None:
    """Run text through the model block by block: GPTQ codes, KV-cache scales, and what the verifier needs.

    Without --text and --dataset the text that comes with quantkit is used. An interrupted run goes on where it stopped.
    """
    from quantkit.quantize.cli.calibrate_commands import Reading, calibrate_command

    reading = Reading(text, dataset, samples, seq_len, seed, trust_remote_code)
    calibrate_command(source, recipe, out, group, reading, memory, device, dtype, min_expert_tokens, json)


@app.command()
def evaluate(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Folder, or a Hub id.")],
    source: Annotated[str, typer.Option("--source", help="The checkpoint it was made from.")],
    text: Text = None,
    dataset: Dataset = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Sequences, from the start of the text.")] = 40,
    seq_len: Annotated[int, typer.Option("--seq-len", min=2, help="Tokens of a sequence.")] = 512,
    kv: Annotated[
        bool,
        typer.Option("--kv", help="Through an FP8 cache with the stored scales; measures attention outputs under it."),
    ] = False,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Activations stay as they are where an engine would quantise them.")
    ] = False,
    gate: Annotated[
        list[str] | None,
        typer.Option("--gate", help="kl=0.05, perplexity_ratio=1.01, top1=0.95, kv_error=0.0015: exit 1 if missed."),
    ] = None,
    memory: Annotated[str, typer.Option("--memory", help="For hidden states, and for each block.")] = "4GB",
    device: Device = "cpu",
    trust_remote_code: RemoteCode = False,
    json: AsJson = False,
) -> None:
    """Perplexity of both, mean KL(source || checkpoint) a token, and how often the most likely token agrees."""
    from quantkit.quantize.cli.calibrate_commands import evaluate_command

    evaluate_command(
        checkpoint, source, text, dataset, samples, seq_len, gate or [], memory, device, json,
        kv=kv, weights_only=weights_only, trust_remote_code=trust_remote_code,
    )  # fmt: skip


@app.command()
def verify(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Folder to check.")],
    source: Annotated[
        str | None, typer.Option("--source", help="The checkpoint it was made from: compare every weight.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", help="Calibration run: kernels use what it recorded."),
    ] = None,
    engine: Twins = None,
    tp: Annotated[list[int] | None, typer.Option("--tp", help="Ranks for --engine, 1 by default; repeatable.")] = None,
    manifest: Annotated[bool, typer.Option("--manifest", help="Compare every file with its SHA-256.")] = False,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="The checks as JUnit XML.")] = None,
    jobs: Jobs = CORES,
    json: AsJson = False,
) -> None:
    """Check a checkpoint: every tensor once, sound scales; with --source every code and error, and the packed kernels.

    --engine adds what an engine will do with each tensor. Exit 1 on a failure, or when an engine would refuse it.
    """
    from quantkit.quantize.cli.commands import verify_command

    verify_command(
        checkpoint, source, run, jobs, json, engines=engine or [], tp=tp or [], manifest=manifest, junit=junit
    )


@app.command()
def recipes(name: Annotated[str | None, typer.Argument(help="Print this recipe.")] = None) -> None:
    """List the shipped recipes, or print one of them."""
    from quantkit.quantize.modelopt_recipes import shipped_by_modelopt
    from quantkit.quantize.shipped import read_recipe, shipped

    if name is not None:
        sys.stdout.write(read_recipe(name)[1])
        return
    found = list(shipped())
    width = max(len(n) for n, _ in found)
    for recipe_name, line in found:
        sys.stdout.write(f"{recipe_name:<{width}}  {line}\n")
    theirs = shipped_by_modelopt()
    if theirs:
        sys.stdout.write("\nModelOpt's, as far as a recipe can say them:\n" + "".join(f"{n}\n" for n in theirs))


app.command()(inspect)
app.command()(card)
app.command()(repair)
app.command()(push)
app.add_typer(bench.app, name="bench")


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    sys.stdout.write(installed("quantkit") + "\n")


def run_app(call: Callable[[], Any]) -> int:
    """Run a command; the exit status is 2 for bad input, printed without a traceback."""
    try:
        call()
    except QuantkitError as e:
        sys.stderr.write(f"error: {e}\n")
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 1
    return 0


def main() -> None:
    """Entry point of the `quantkit` script."""
    sys.exit(run_app(app))


if __name__ == "__main__":
    main()
