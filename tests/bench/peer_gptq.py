"""One run of llm-compressor's GPTQ, in the peer's own environment (make_peer_venv.sh).

usage: python peer_gptq.py SOURCE OUT IDS.npy GROUP

As its documentation has it: the model as it is stored, all linear layers but the head, static act-order, and the
compressed checkpoint saved. Prints one line of JSON: the seconds of loading, quantising and saving, imports left out.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path


def main() -> None:
    """Calibrate, save and print the time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("ids", type=Path)
    parser.add_argument("group", type=int)
    args = parser.parse_args()

    import numpy as np
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoModelForCausalLM

    ids = np.load(args.ids)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": args.group}
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(args.source, dtype="auto")
    rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in ids]
    oneshot(
        model=model,
        dataset=Dataset.from_list(rows),
        recipe=GPTQModifier(
            config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
            ignore=["lm_head"],
            actorder="static",
        ),
        max_seq_length=ids.shape[1],
        num_calibration_samples=len(ids),
    )
    model.save_pretrained(args.out, save_compressed=True)
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
