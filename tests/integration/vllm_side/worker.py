"""Runs inside vLLM's environment: loads checkpoints with vLLM's own loader, reports what happened, or generates.

    PYTHON worker.py             PYTHON is the python of vLLM's environment

Each line of the input is a job, a JSON object; each gets a line with its result, which has `error` when the job failed.

    {"task": "load", "folder": F, "twin": T, "draft": true}
                                                         what the loader used and filled (see watch.py), and which weights
                                                         differ from those of the twin, an unquantised checkpoint; `draft`
                                                         loads the draft model of speculative decoding, its MTP layers
    {"task": "greedy", "folder": F, "prompts": [[ids]], "tokens": N, "as_is": true}
                                                         N greedy tokens for each prompt, each with the five best
                                                         [token, log probability]; `as_is` uses vLLM's own kernels, otherwise
                                                         every quantised layer is dequantised at load (see dense.py)
    {"task": "operators", "names": [...]}                which of these operators this build of vLLM has on this CPU

vLLM is imported once; each job runs in a fork of this process, so that no job sees another's state.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, ClassVar

LIMIT = 300  # seconds for one job
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # vLLM would compile a line of its sampler, for seconds, in every process
    "OMP_NUM_THREADS": "1",  # more would wait for each other at every small layer of these models
    "VLLM_CPU_INT4_W4A8": "0",  # weights only, as on a GPU: the CPU build would round activations to 8 bits
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
ENGINE = {"dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 4, "enforce_eager": True}
DENSE = "dense"  # the load format of the loader below


def prepare(asked: list[str]) -> None:
    """Import vLLM, once, and register the loader that watches."""
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # ask Linux for the tiles: vLLM's attention uses them without, an illegal instruction

    from vllm import LLM
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.v1.worker.cpu_worker import CPUWorker

    assert LLM
    assert CPUWorker  # both imported for the children: hundreds of modules

    import dense
    import watch

    dense.allow_missing_kernels(asked)

    class DenseLoader(DefaultModelLoader):
        """vLLM's loader, watched; then every quantised layer is dequantised."""

        last: ClassVar[dict[str, Any]] = {}
        seen: watch.Watch

        def __init__(self, load_config: Any) -> None:
            super().__init__(dataclasses.replace(load_config, load_format="safetensors"))

        def get_all_weights(self, model_config: Any, model: Any) -> Any:
            return self.seen.checkpoint(super().get_all_weights(model_config, model))

        def load_weights(self, model: Any, model_config: Any) -> None:
            self.seen = watch.Watch(model)
            with self.seen:
                super().load_weights(model, model_config)
            report = self.seen.report(model)
            report["input_scales"] = dense.input_scales(model)
            report["dense"] = dense.make_dense(model)
            type(self).last = report

    register_model_loader(DENSE)(DenseLoader)


def register_model(folder: str) -> None:
    """Import the model class of a checkpoint in this process; vLLM would start another, for seconds, to inspect it."""
    from vllm import ModelRegistry

    architecture = json.loads((Path(folder) / "config.json").read_text())["architectures"][0]
    model = ModelRegistry.models.get(architecture)
    if model is not None:
        ModelRegistry.register_model(architecture, model.load_model_cls())


def load(job: dict[str, Any]) -> dict[str, Any]:
    """Load `folder` as vLLM does, say what its loader did; compare with `twin` loaded the same way."""
    import torch

    draft = bool(job.get("draft"))
    result: dict[str, Any] = {}
    weights = load_model(job["folder"], draft, result)
    twin = load_model(job["twin"], draft, {})
    result["extra"] = sorted(set(weights) - set(twin))
    result["differ"] = [n for n in sorted(twin) if n not in weights or not torch.equal(weights[n], twin[n])]
    return result


def load_model(folder: str, draft: bool, result: dict[str, Any]) -> dict[str, Any]:
    """The parameters, by name, of a model that vLLM built and loaded; its report goes to `result`."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment, parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.utils.torch_utils import set_default_torch_dtype

    more = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}} if draft else {}
    arguments = EngineArgs(model=folder, skip_tokenizer_init=True, load_format=DENSE, **ENGINE, **more)
    config = arguments.create_engine_config()
    model_config = config.speculative_config.draft_model_config if draft else config.model_config
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        if not parallel_state.model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/rendezvous", 0, backend="gloo")
            ensure_model_parallel_initialized(1, 1)
        loader = get_model_loader(config.load_config)
        model = loader.create_model(config, model_config)
        loader.load_weights(model, model_config)
    result.update(type(loader).last)
    result["quantization"] = config.model_config.quantization
    return dict(model.named_parameters())


def greedy(job: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens for each prompt, with the five best candidates of every step; `kv_cache` is a dtype of the cache."""
    from vllm import LLM, SamplingParams

    start = time.time()
    load_format = "auto" if job.get("as_is") else DENSE
    cache = {"kv_cache_dtype": job["kv_cache"]} if "kv_cache" in job else {}
    llm = LLM(job["folder"], skip_tokenizer_init=True, load_format=load_format, **ENGINE, **cache)
    built = time.time()
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    sampling = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False, logprobs=5)
    outputs = [request.outputs[0] for request in llm.generate(prompts, sampling, use_tqdm=False)]
    best = [
        [sorted(((t, p.logprob) for t, p in step.items()), key=lambda x: -x[1])[:5] for step in output.logprobs]
        for output in outputs
    ]
    tokens = [list(output.token_ids) for output in outputs]
    return {"tokens": tokens, "best": best, "build_s": built - start, "generate_s": time.time() - built}


def operators(job: dict[str, Any]) -> dict[str, Any]:
    """Which operators this build has: vLLM's wheel has fewer for a CPU without AVX-512."""
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return {"has": [name for name in job["names"] if hasattr(torch.ops._C, name)]}


TASKS = {"load": load, "greedy": greedy, "operators": operators}


def forked(job: dict[str, Any], asked: list[str]) -> dict[str, Any]:
    """Run one job in a child process; its result, or an `error` that says how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        start = time.time()
        child = os.fork()
        if child == 0:
            signal.alarm(LIMIT)
            try:
                result = TASKS[job["task"]](job)
            except BaseException as error:
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"}
            path.write_text(json.dumps(result | {"no_kernel": sorted(set(asked))}))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        result = json.loads(path.read_text()) if path.exists() else {"error": f"the process ended with status {status}"}
        return result | {"seconds": round(time.time() - start, 1)}


def main() -> None:
    os.environ.update(SETTINGS)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints goes to stderr
    asked: list[str] = []
    prepare(asked)
    for line in sys.stdin:
        job = json.loads(line)
        for key in ("folder", "twin"):
            if job.get(key):
                register_model(job[key])
        answers.write(json.dumps(forked(job, asked)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
