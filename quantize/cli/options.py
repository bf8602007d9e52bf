"""Arguments and options that several commands share, with the help that people read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Checkpoint folder, or a Hub id such as org/name.")]
RecipeName = Annotated[
    str, typer.Option("-r", "--recipe", help="A shipped recipe (see `quantkit recipes`) or a .yaml file.")
]
OutFolder = Annotated[Path, typer.Option("-o", "--out", help="Folder to write; it must not hold anything yet.")]
FormatName = Annotated[
    str | None,
    typer.Option(
        "--format", help="compressed-tensors, gptq, gptq-v2, awq, modelopt, fp8, mxfp4; the recipe's by default."
    ),
]
GroupSize = Annotated[
    str | None,
    typer.Option("--group", help="INT4 group of all INT4 rules: 32, 64, 128, channel, or auto (largest that divides)."),
]
TpSizes = Annotated[
    list[int] | None, typer.Option("--tp", help="Tensor-parallel size that has to load; may be repeated.")
]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Threads; all cores by default.", show_default=False)]
Memory = Annotated[str, typer.Option("--memory", help="Buffers of all threads together, such as 512MB or 4GB.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
Private = Annotated[bool, typer.Option("--private", help="A repository that only its owners see.")]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, made empty if new, or refs/pr/N.")]
CreatePr = Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of writing to the branch.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what the repository or branch holds.")]
Text = Annotated[
    str | None,
    typer.Option("--text", help=".txt, .jsonl or .parquet file, or token ids (.npy, .safetensors, .json)."),
]
Dataset = Annotated[
    str | None, typer.Option("--dataset", help="Data set as NAME[:CONFIG][:SPLIT], loaded by `datasets`.")
]
Engine = Annotated[
    str,
    typer.Option("--engine", help="Names of KV scales: vllm, sglang, trtllm, transformers. After calibration only."),
]
Twins = Annotated[
    list[str] | None,
    typer.Option("--engine", help="Say what vllm, sglang, trtllm or transformers would do with it; may be repeated."),
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1 ...: where blocks are run.")]
RemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint.")
]
Samples = Annotated[int | None, typer.Option("--samples", min=1, help="The recipe's by default.")]
SeqLen = Annotated[int | None, typer.Option("--seq-len", min=1, help="Tokens of a sample.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Chooses the samples.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option("--dtype", help="Of weights and states; auto: bfloat16 where the hardware has it."),
]
