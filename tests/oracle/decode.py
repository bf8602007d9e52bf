"""One request decoded by itself: no pages, no batch, the softmax written out in float64 over the stored values."""

import ml_dtypes
import numpy as np


def stored(x, format, scale):
    """What a cache gives back for x."""
    if format == "bf16":
        return x.astype(ml_dtypes.bfloat16).astype(np.float64)
    return np.clip(x / np.float32(scale), -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def attend(q_QD, k_THD, v_THD, softmax_scale):
    """Attention output [Q, D] of one token over all T."""
    group = len(q_QD) // k_THD.shape[1]
    out = []
    for head, q_D in enumerate(q_QD.astype(np.float64)):
        logits_T = k_THD[:, head // group] @ q_D * softmax_scale
        p_T = np.exp(logits_T - logits_T.max())
        out.append(p_T @ v_THD[:, head // group] / p_T.sum())
    return np.array(out)


def decode(model, prompt, new_tokens, format, scale):
    """The tokens that follow a prompt."""
    text = np.append(prompt, np.zeros(new_tokens, np.int32)).astype(np.int32)
    positions = np.arange(len(text), dtype=np.int32)
    k, v = (stored(x, format, scale) for x in model.keys_values(text[: len(prompt)], positions[: len(prompt)]))
    for n in range(len(prompt), len(text)):
        q = model.queries(text[n - 1 : n], positions[n - 1 : n])[0]
        o = attend(q, k, v, model.softmax_scale)
        text[n] = model.next_tokens(o[None])[0]
        new = (stored(x, format, scale) for x in model.keys_values(text[n : n + 1], positions[n : n + 1]))
        k, v = (np.concatenate(pair) for pair in zip((k, v), new, strict=True))
    return text[len(prompt) :].tolist()
