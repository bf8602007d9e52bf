"""`quantkit bench`: how fast the packed kernels are on this machine, and what an FP8 cache and its page tags cost.

Only typer is imported here, so that `--help` answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Measure the kernels on this machine.", rich_markup_mode=None)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Threads = Annotated[int | None, typer.Option("--threads", help="Threads; all cores by default.", show_default=False)]


@app.command()
def kernels(
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    shape: Annotated[
        list[str] | None, typer.Option("--shape", help="Outputs x inputs; may be repeated. [4096x4096, 6144x2048]")
    ] = None,
    tokens: Annotated[
        list[str] | None, typer.Option("--tokens", help="Tokens of a batch, such as 1,8. [1,4,8,64,256]")
    ] = None,
    schemes: Annotated[
        str | None,
        typer.Option("--schemes", help="Kernels, such as int4-g128,kv-e4m3,mla-dsa; a wrong name lists all."),
    ] = None,
    context: Annotated[int, typer.Option("--context", help="Cached tokens of the attention.")] = 16384,
    threads: Threads = None,
    repeat: Annotated[int, typer.Option("--repeat", help="Turns of each kernel.")] = 7,
    json: AsJson = False,
) -> None:
    """Time packed GEMM and decode attention beside what else is installed: torch, ATen's INT4 kernel."""
    from quantkit.quantize.cli.bench_commands import kernels_command

    kernels_command(device, shape or [], tokens or [], schemes, context, threads, repeat, json)


@app.command()
def kv(
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Requests at a time, for the budget.")
    ] = "1,2,4,8,16,32,64",
    budget: Annotated[str, typer.Option("--budget", help="Memory for the keys and values of one layer.")] = "1GiB",
    context: Annotated[int, typer.Option("--context", help="Prompt tokens of each request.")] = 8000,
    new: Annotated[int, typer.Option("--new", help="Tokens that each request generates.")] = 32,
    seconds: Annotated[
        float,
        typer.Option("--seconds", help="For the cost of the page tags at each concurrency; more where steps are long."),
    ] = 10.0,
    requests: Annotated[int, typer.Option("--requests", help="Requests of the replay with faults.")] = 400,
    threads: Threads = None,
    json: AsJson = False,
) -> None:
    """Serve synthetic requests from a BF16 and an FP8 cache: what fits, how fast, the cost of page tags, faults found.

    Exit 1 if a fault is missed, an alarm is false, or a wrong token is released.
    """
    from quantkit.quantize.cli.bench_commands import kv_command

    kv_command(concurrency, budget, context, new, seconds, requests, threads, json)
