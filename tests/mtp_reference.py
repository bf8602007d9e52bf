"""The MTP layer of a tiny checkpoint written out by hand around one decoder layer of transformers.

The ordinary model gives the states behind its last norm; norms, concatenation and projection are formulas here; the
decoder layer is an instance of the model's own class with the layer's tensors, and gets the mask and positions that the
model hands to its layers for as many tokens. Nothing of the product is used.

Shape suffixes: N samples, L tokens of a sample, D hidden size, E experts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from families import Tensors, load_tensors
from model_weights import reference
from transformers import DynamicCache


@dataclass
class Mtp:
    """What the layer gave [N, L - 1, D], what entered its linear layers and routed experts, and its keys and values."""

    hidden: torch.Tensor
    inputs: dict[str, torch.Tensor]
    cache: Any


def run_mtp(folder: Path, ids_NL: torch.Tensor, tensors: Tensors | None = None) -> Mtp:
    """The MTP layer on the text, with the checkpoint's tensors or others in their place."""
    full = reference(folder, tensors)
    tensors = load_tensors(folder) if tensors is None else tensors
    count, eps = full.config.num_hidden_layers, full.config.rms_norm_eps
    own = {n.removeprefix(f"model.layers.{count}."): t.float() for n, t in tensors.items() if f"layers.{count}." in n}
    like = max(i for i, kind in enumerate(getattr(full.config, "indexer_types", ["full"] * count)) if kind == "full")
    handed: dict[str, Any] = {}

    def take(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        handed.update(kwargs)

    with torch.no_grad():
        handle = full.model.layers[like].register_forward_pre_hook(take, with_kwargs=True)
        full.model(ids_NL[:, :-1], use_cache=False)
        handle.remove()
        states_NLD = full.model(ids_NL, use_cache=False).last_hidden_state[:, :-1]
        following_NLD = full.model.embed_tokens.weight[ids_NL[:, 1:]]
        joined = torch.cat(
            (_rms(following_NLD, own["enorm.weight"], eps), _rms(states_NLD, own["hnorm.weight"], eps)), -1
        )
        x_NLD = joined @ own["eh_proj.weight"].T
        layer = _layer(full, like, own)
        inputs = {"eh_proj": joined.flatten(0, 1)}
        handles = _watched(layer, inputs)
        handed |= {"past_key_values": DynamicCache(config=full.config), "use_cache": True}
        handed.pop("prev_topk_indices", None)
        out = layer(x_NLD, **{k: v for k, v in handed.items() if k != "hidden_states"})
        for handle in handles:
            handle.remove()
    return Mtp(out[0] if isinstance(out, tuple) else out, inputs, handed["past_key_values"].layers[like])


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * (x / (x.square().mean(-1, keepdim=True) + eps).sqrt())


def _layer(full: Any, index: int, own: Tensors) -> Any:
    """A decoder layer of the model's class with these tensors, experts stacked by hand."""
    layer = type(full.model.layers[index])(full.config, index).eval().float()
    state = {}
    for name, old in layer.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = (_stacked(own, f"{p}_proj") for p in ("gate", "up"))
            state[name] = torch.cat((gate, up), 1)
        elif name.endswith("experts.down_proj"):
            state[name] = _stacked(own, "down_proj")
        else:
            state[name] = own[name].reshape(old.shape)
    layer.load_state_dict(state)
    return layer


def _stacked(own: Tensors, matrix: str) -> torch.Tensor:
    found = {int(m[1]): t for n, t in own.items() if (m := re.fullmatch(rf"mlp\.experts\.(\d+)\.{matrix}\.weight", n))}
    return torch.stack([found[e] for e in sorted(found)])


def _watched(layer: Any, inputs: dict[str, torch.Tensor]) -> list[Any]:
    handles = []
    for name, module in layer.named_modules():

        def keep(_: Any, args: Any, name: str = name) -> None:
            inputs[name] = args[0].flatten(0, -2)

        def keep_routed(_: Any, args: Any) -> None:
            x, index = args[0].flatten(0, -2), args[1].flatten(0, -2)
            for e in torch.unique(index).tolist():
                inputs[f"mlp.experts.{e}"] = x[(index == e).any(-1)]

        if isinstance(module, torch.nn.Linear):
            handles.append(module.register_forward_pre_hook(keep))
        elif name.endswith(".experts"):
            handles.append(module.register_forward_pre_hook(keep_routed))
    return handles
