"""INT4 codes of every dialect, one nibble at a time, from the formats' descriptions. Shares no code with the product."""

import json

import numpy as np
from safetensors import safe_open

AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def nibble(word, n):
    return (int(word) >> (4 * n)) & 15


def compressed_tensors(packed, shape):
    rows, inputs = shape
    return np.array([[nibble(packed[r, k // 8], k % 8) - 8 for k in range(inputs)] for r in range(rows)])


def gptq(qweight):
    lines, rows = qweight.shape
    return np.array([[nibble(qweight[k // 8, r], k % 8) - 8 for k in range(8 * lines)] for r in range(rows)])


def awq(qweight):
    """Stored codes 0..15 less 8."""
    inputs, words = qweight.shape
    codes = np.empty((8 * words, inputs), int)
    for k in range(inputs):
        for w in range(words):
            for n in range(8):
                codes[8 * w + AWQ[n], k] = nibble(qweight[k, w], n) - 8
    return codes


def modelopt(weight):
    """Two rows in a byte, two's complement."""
    codes = np.empty((2 * len(weight), weight.shape[1]), int)
    for r in range(len(codes)):
        for k in range(weight.shape[1]):
            n = nibble(weight[r // 2, k], r % 2)
            codes[r, k] = n - 16 if n > 7 else n
    return codes


def layer(folder, module):
    """(codes -8..7 [O, I], scale [O, G] as float, zero [O, G]) of a layer in whichever dialect it is stored."""
    with safe_open(folder / "model.safetensors", "pt") as f:
        parts = {n.removeprefix(module + "."): f.get_tensor(n) for n in f.keys() if n.startswith(module + ".")}  # noqa: SIM118
    text = {n: t.float().numpy() if t.dtype.is_floating_point else t.numpy() for n, t in parts.items()}
    if "weight_packed" in text:
        codes, scale = compressed_tensors(text["weight_packed"], text["weight_shape"]), text["weight_scale"]
        words = text.get("weight_zero_point")
        zero = np.zeros(scale.shape, int)
        for r, g in np.ndindex(*scale.shape):
            zero[r, g] = 0 if words is None else nibble(words[r // 8, g], r % 8) - 8
        return codes, scale, zero
    if "weight" in text:
        return modelopt(text["weight"]), text["weight_scale"], np.zeros(text["weight_scale"].shape, int)
    scale, is_gptq = text["scales"].T, "g_idx" in text
    zero = np.zeros(scale.shape, int)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    less = int(config.get("checkpoint_format") == "gptq")  # v1 stores one less
    for r, g in np.ndindex(*scale.shape):
        at = r % 8 if is_gptq else AWQ.index(r % 8)
        zero[r, g] = nibble(text["qzeros"][g, r // 8], at) + less - 8
    return (gptq if is_gptq else awq)(text["qweight"]), scale, zero
