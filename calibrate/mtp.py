"""The layer that predicts the token after the next (MTP), as one more decoder layer behind the last.

Its input is made of two things: what the model says of a token, behind its last norm, and the embedding of the token
that follows. Both are normalised, joined and projected; what comes then is an ordinary decoder layer:

    x_t = eh_proj [enorm(embedding of token t + 1), hnorm(state of token t)]

SGLang, TensorRT-LLM and transformers compute that for every position. vLLM puts zeros in place of the embedding at
position 0, which is one token of a sample. The last token of a sample has none after it and is left out.

Source: DeepSeek-V3 (arXiv 2412.19437), 2.2. Checkpoints keep the layer as number `num_hidden_layers`, and transformers
leaves it out of the model; a model that is built with one layer more has it, with its class, masks and positions.

Letters: N samples of one batch, L tokens of a sample, D hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from quantkit.calibrate.activations import State

FAMILIES = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa")
OWN = ("enorm", "hnorm", "eh_proj")  # what the layer has beside a decoder layer and is part of its forward
# what lies there as well: copies of the model's own embedding and head, and the norm before that head
_BEHIND = re.compile(r"(?:embed_tokens|shared_head\.(?:norm|head))\.weight")
_BY_LAYER = ("layer_types", "mlp_layer_types", "indexer_types")


def has_mtp(config: Any, names: Iterable[str]) -> bool:
    """Whether a checkpoint with tensors of these names holds one MTP layer of that form, in a family known here."""
    own = re.compile(rf"(?:.*\.)?layers\.(\d+)\.(?:{'|'.join(OWN)})\.weight")
    found = [int(m[1]) for n in names if (m := own.fullmatch(n))]
    return config.model_type in FAMILIES and found == [config.num_hidden_layers] * len(OWN)


def with_mtp(config: Any) -> Any:
    """The configuration of a model with one decoder layer more: of the kind of the last, with an indexer of its own."""
    settings = config.to_dict()
    settings["num_hidden_layers"] += 1
    for key in _BY_LAYER:
        kinds = settings.get(key)
        if kinds is not None:
            settings[key] = [*kinds, "full" if key == "indexer_types" else kinds[-1]]
    return type(config).from_dict(settings)


def add_pieces(layer: Any, config: Any) -> None:
    """Give the last decoder layer of a meta model the norms and the projection that make its input."""
    with torch.device("meta"):
        for name in OWN[:2]:
            layer.add_module(name, type(layer.input_layernorm)(config.hidden_size, eps=config.rms_norm_eps))
        layer.add_module("eh_proj", torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False))


def is_left_out(name: str) -> bool:
    """Whether a tensor of the layer, by its name inside, is none of its forward."""
    return _BEHIND.fullmatch(name) is not None


def joined(state: State, ids_NL: torch.Tensor, norm: torch.nn.Module, embedding: torch.nn.Module) -> State:
    """What enters the layer: [N, L - 1, 2 D], embeddings of the next tokens beside what left the last decoder layer.

    norm  the model's last
    """
    normed = norm(state.hidden)
    following = embedding(ids_NL[:, 1:])
    rest = None if state.rest is None else (None,) * len(state.rest)  # the layer has an indexer of its own
    return State(torch.cat((following, normed[:, :-1]), dim=-1), rest)


def projected(layer: Any, hidden_NL2D: torch.Tensor) -> torch.Tensor:
    """The input of the decoder layer [N, L, D] from what `joined` made."""
    following, normed = hidden_NL2D.chunk(2, dim=-1)
    x: torch.Tensor = layer.eh_proj(torch.cat((layer.enorm(following), layer.hnorm(normed)), dim=-1))
    return x
