"""vLLM generates from what quantkit writes, and says what the dequantised model says.

Two comparisons with the twin, the bf16 model of the oracle's dequantised weights, run by the same vLLM:

* Dequantised at load (see vllm_side/dense.py) the checkpoint must give the same tokens with the same log probabilities, every
  one of the five best of each step. No tolerance: equal weights go through equal operations.
* As it is, with vLLM's own INT4 kernel, where this CPU has one (AVX-512). The kernel multiplies codes and scales in another
  order and precision than a dense product, and the twin's weights are rounded to bf16: logits differ in the last bit or two
  of bf16, which is 0.125 for the logits of 16 to 32 of this model. So a token may differ only where the twin itself
  was within FLIP of choosing it; a wrong layout or scale leaves the twin's candidates at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integration.checkpoints import calibrate, export, quantise, write_twin
from integration.engine import Engine
from integration.schemes import options, recipe

pytestmark = pytest.mark.vllm

FLIP = 0.25  # two steps of bf16
FLIP_FP8 = 1.0  # keys and values have 3 bits of mantissa: a relative error of 3 % each
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Water boils at",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
)
# The hidden size of 576 is no multiple of 128: of this model only gate and up can have blocks of 128 x 128, since vLLM wants
# whole blocks of rows in each layer.
BLOCKS = recipe(
    '  - {match: {name: "*.gate_proj.weight"}, scheme: fp8-block}',
    '  - {match: {name: "*.up_proj.weight"}, scheme: fp8-block}',
    format="compressed-tensors",
)


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="module")
def before(model: Path, prompts: list[list[int]], vllm: Engine) -> dict[str, Any]:
    """What the source says."""
    return generate(vllm, model, prompts)


@pytest.mark.parametrize("name", ["int4", "nvfp4", "fp8-channel", "fp8-block"])
def test_real_model(
    name: str, model: Path, prompts: list[list[int]], before: dict[str, Any], room: Path, vllm: Engine
) -> None:
    (room / "blocks.yaml").write_text(BLOCKS)
    chosen = {"int4": ("-r", "int4", "--group", "64"), "fp8-block": ("-r", str(room / "blocks.yaml"))}
    written = quantise(model, room / "out", *chosen.get(name, ("-r", name)))
    twin = write_twin(model, written, room / "twin")

    expected = generate(vllm, twin, prompts)
    assert_equal(generate(vllm, written, prompts), expected)
    if name == "int4" and vllm.run(task="operators", names=["cpu_gemm_wna16"])["has"]:
        assert_close(generate(vllm, written, prompts, as_is=True), expected)
    assert before["best"] != expected["best"], "the comparison could not tell the twin from the source"


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", "int4-experts"),
        ("qwen3_moe", "nvfp4-experts"),
        ("qwen3_moe", "fp8"),
        ("deepseek_v3", "int4-experts"),
    ],
)
def test_tiny_experts(family: str, name: str, source: Callable[[str], Path], room: Path, vllm: Engine) -> None:
    plain = source(family)
    written = quantise(plain, room / "out", *options(room, family, name))
    twin = write_twin(plain, written, room / "twin")
    prompts = [[5, 17, 200, 31], [3, 250, 90, 8, 121, 66, 7]]

    expected = generate(vllm, twin, prompts)
    assert_equal(generate(vllm, written, prompts), expected)
    assert generate(vllm, plain, prompts)["best"] != expected["best"]


def test_calibrated_real_model_with_an_fp8_cache(
    model: Path, prompts: list[list[int]], room: Path, vllm: Engine
) -> None:
    recipe = ("-r", "int4-gptq-kv-fp8", "--group", "64")
    written = calibrate(model, room / "out", room, *recipe, length=512)  # as few tokens as KV scales take
    twin = write_twin(model, written, room / "twin")

    expected = generate(vllm, twin, prompts)
    assert_equal(generate(vllm, written, prompts, kv_cache="bfloat16"), expected)
    if vllm.run(task="operators", names=["cpu_gemm_wna16"])["has"]:  # its own kernel reads all three dialects
        dialects = [dialect(room, name) for name in ("gptq", "awq")]
        ours, *theirs = [generate(vllm, f, prompts, as_is=True, kv_cache="bfloat16") for f in (written, *dialects)]
        for other in theirs:
            assert_equal(other, ours)
    if fp8_cache_runs():  # the configuration alone switches the cache on: no option is given
        assert_close(generate(vllm, written, prompts), expected, FLIP_FP8)


def dialect(room: Path, name: str) -> Path:
    """The same run in another format: nothing is calibrated again."""
    return export(room / "run", room / name, "--format", name)


def fp8_cache_runs() -> bool:
    """vLLM's CPU build has an FP8 cache for x86 with AVX-512 only."""
    return "avx512f" in Path("/proc/cpuinfo").read_text()


def generate(
    vllm: Engine, folder: Path, prompts: list[list[int]], *, as_is: bool = False, **more: str
) -> dict[str, Any]:
    result = vllm.run(task="greedy", folder=folder, prompts=prompts, tokens=16, as_is=as_is, **more)
    assert "error" not in result, result["error"]
    return result


def assert_equal(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert result["tokens"] == expected["tokens"]
    assert result["best"] == expected["best"]


def assert_close(result: dict[str, Any], expected: dict[str, Any], flip: float = FLIP) -> None:
    """Same tokens up to the first near-tie of the twin, in every prompt; see FLIP."""
    for got, want, candidates in zip(result["tokens"], expected["tokens"], expected["best"], strict=True):
        for mine, theirs, step in zip(got, want, candidates, strict=True):
            if mine != theirs:
                log_probability = dict(step)
                assert mine in log_probability, f"token {mine} is none of the twin's five best: {step}"
                assert log_probability[theirs] - log_probability[mine] <= flip, step
                break
