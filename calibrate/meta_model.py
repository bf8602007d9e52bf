"""The transformers model of a checkpoint without its weights: built on the meta device from config.json alone.

What its forward needs besides weights (rotary frequencies, embedding scales) is computed as transformers does it, and a
run of two tokens on the meta device tells which linear layers see the same input, for every family alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from quantkit.calibrate.mtp import add_pieces, has_mtp, with_mtp
from quantkit.calibrate.observe import bound
from quantkit.kernels.errors import QuantkitError

_SAME = {"kimi_k2": "deepseek_v3"}  # Kimi-K2 is DeepSeek-V3 under another name; transformers knows it by the latter
_LISTS = ("layers", "h", "blocks")
# what a block-by-block forward would silently lose: keys and values shared between layers, a second set of embeddings
_LOST = ("num_kv_shared_layers", "hidden_size_per_layer_input")
NEVER = ("gate", "router", "shared_expert_gate")  # routers: never quantised, whatever class they are


def _language_config(folder: Path, trust_remote_code: bool) -> tuple[Any, bool]:
    """The configuration of the language model, and whether it lies inside that of a multimodal one."""
    from transformers import AutoConfig, PretrainedConfig

    try:
        raw, _ = PretrainedConfig.get_config_dict(folder)
    except (OSError, ValueError) as e:
        raise QuantkitError(f"config.json cannot be read: {e}", file=folder) from e
    nested = isinstance(raw.get("text_config"), dict)
    inner = raw["text_config"] if nested else raw
    try:
        if inner.get("model_type") in _SAME:
            settings = {k: v for k, v in inner.items() if k not in ("model_type", "auto_map", "architectures")}
            return AutoConfig.for_model(_SAME[inner["model_type"]], **settings), nested
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as e:
        if "auto_map" in raw and not trust_remote_code:
            raise QuantkitError(
                "the model brings its own Python code, which is not run unless you ask for it",
                file=folder / "config.json", value=raw.get("model_type"), hint="read it, then add --trust-remote-code",
            ) from e  # fmt: skip
        raise QuantkitError(
            "transformers does not know the model, so it cannot be run", file=folder / "config.json",
            value=raw.get("model_type"), hint=str(e).splitlines()[0],
        ) from e  # fmt: skip
    text = config.get_text_config()
    return text, text is not config


def _refuse(config: Any, folder: Path) -> None:
    for key in _LOST:
        if getattr(config, key, None):
            raise QuantkitError(
                "this family cannot be run block by block: its layers pass on more than hidden states",
                file=folder / "config.json", value=f"{key} = {getattr(config, key)}",
            )  # fmt: skip


def build(
    folder: Path, dtype: torch.dtype, trust_remote_code: bool, mtp: Iterable[str] = ()
) -> tuple[Any, bool, int | None]:
    """The meta model, in eval mode; whether names of the checkpoint carry the prefix of a multimodal model; and the
    number of its MTP layer, which it has when the names `mtp` of the checkpoint's tensors hold one (None: it has none).

    Raises QuantkitError for a model that transformers lacks, that needs remote code, or that cannot run block by block.
    """
    from transformers import AutoModelForCausalLM

    config, nested = _language_config(folder, trust_remote_code)
    _refuse(config, folder)
    last = int(config.num_hidden_layers) if has_mtp(config, mtp) else None
    if last is not None:
        config = with_mtp(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the values arrive decoded
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=dtype, experts_implementation="eager", trust_remote_code=trust_remote_code
            )
    except ValueError as e:
        raise QuantkitError(
            "transformers has no causal language model for this configuration", file=folder / "config.json",
            value=config.model_type, hint=str(e).splitlines()[0],
        ) from e  # fmt: skip
    if last is not None:
        add_pieces(model.model.layers[last], config)
    return model.eval(), nested, last


def find_layers(model: Any) -> tuple[str, torch.nn.ModuleList]:
    """The list of decoder layers and its name; refuses a model with other weights beside embeddings, norm and head."""
    backbone = getattr(model, model.base_model_prefix, None)
    name = next((n for n in _LISTS if isinstance(getattr(backbone, n, None), torch.nn.ModuleList)), None)
    if backbone is None or name is None:
        raise QuantkitError("the list of decoder layers was not found", value=type(model).__name__, allowed=_LISTS)
    for child, module in backbone.named_children():
        plain = child == name or module is model.get_input_embeddings() or "norm" in child or child == "ln_f"
        if not plain and any(True for _ in module.parameters()):
            raise QuantkitError(
                "this family cannot be run block by block: it has weights beside layers, embedding, norm and head",
                value=f"{model.base_model_prefix}.{child}",
            )
    return f"{model.base_model_prefix}.{name}", getattr(backbone, name)


def input_sets(model: Any, layers: torch.nn.ModuleList) -> list[list[tuple[str, ...]]]:
    """For each layer the names (inside the layer) of linear layers that see the same tensor, in the order they run.

    Found by a run of two tokens on the meta device. A family whose forward cannot run there gets sets of one.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    found: list[list[tuple[str, ...]]] = []
    seen: list[dict[str, torch.Tensor]] = []
    with ExitStack() as stack:
        for layer in layers:
            inputs: dict[str, torch.Tensor] = {}
            seen.append(inputs)
            for name, module in layer.named_modules():
                if not isinstance(module, torch.nn.Linear):
                    continue

                def hook(_: Any, args: Any, name: str = name, inputs: dict[str, torch.Tensor] = inputs) -> None:
                    inputs.setdefault(name, args[0])

                stack.callback(module.register_forward_pre_hook(hook).remove)
        stack.enter_context(bound(ALL_EXPERTS_FUNCTIONS, "eager", lambda module, x, *_: torch.empty_like(x)))
        stack.enter_context(torch.no_grad())
        try:
            run_on_meta(model)
        except (NotImplementedError, RuntimeError):
            seen = [{} for _ in layers]
    for layer, inputs in zip(layers, seen, strict=True):
        sets: dict[int, list[str]] = {}
        for name, x in inputs.items():
            sets.setdefault(id(x), []).append(name)
        rest = [n for n, m in layer.named_modules() if isinstance(m, torch.nn.Linear) and n not in inputs]
        every = [*sets.values(), *([n] for n in rest)]
        kept = [tuple(n for n in names if n.rpartition(".")[2] not in NEVER) for names in every]
        found.append([names for names in kept if names])
    return found


def run_on_meta(model: Any) -> None:
    """A forward of two tokens on the meta device."""
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    mask = torch.zeros(1, 1, 2, 2, device="meta")  # a finished mask: making one asks for values
    getattr(model, model.base_model_prefix)(input_ids=ids, attention_mask=mask, use_cache=False)


def materialise_buffers(model: Any, device: torch.device) -> None:
    """Compute what no checkpoint holds: non-persistent buffers, by the model's own initialisation."""
    persistent = set(model.state_dict())
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        lost = [n for n, b in module.named_buffers(recurse=False) if prefix + n not in persistent and b.is_meta]
        for n in lost:
            module._buffers[n] = torch.empty_like(module._buffers[n], device=device)
        if lost:
            with torch.no_grad():
                model._init_weights(module)
