"""The model card: the Hub's metadata, what was quantised how, errors, evaluation, and the command of each engine.

Made from `quantkit.json` and config.json alone, so that it can be made again when a checkpoint was evaluated; without a
date, so that equal runs give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from quantkit.export.checkpoint import quantization_config, read_json
from quantkit.export.manifest import MANIFEST
from quantkit.export.serving import NAMES, servings
from quantkit.export.verify import manifest_of
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.measure import relative_error

CARD = "README.md"
SOURCE_CARD = "README.source.md"  # the source's own card
SCORES = ("text", "text_digest", "kv", "tokens", "perplexity_source", "perplexity_candidate", "kl", "top1")
CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag", "library_name")
REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Card:
    """What a card is made of: the files of the checkpoint, the source's card, an evaluation (`evaluate --json`)."""

    manifest: Mapping[str, Any]
    config: Mapping[str, Any]
    source_card: str | None = None

    @property
    def evaluation(self) -> Mapping[str, Any] | None:
        """What `quantkit card --evaluation` has put into the manifest."""
        return self.manifest.get("evaluation")

    @property
    def quantized(self) -> list[Mapping[str, Any]]:
        """Rows of roles that are quantised, or were already."""
        return [r for r in self.manifest["roles"] if r["scheme"] and r["fate"] != "drop"]

    def text(self) -> str:
        """The whole README.md."""
        parts = [self._head(), self._roles(), self._evaluation(), self._serving()]
        return f"---\n{self._metadata()}\n---\n\n" + "\n\n".join(p for p in parts if p) + "\n"

    def _metadata(self) -> str:
        from huggingface_hub import EvalResult, ModelCardData

        carried = {k: v for k, v in front_matter(self.source_card).items() if k in CARRIED}
        source, scores = self.manifest["source"], self.evaluation
        results = None
        if scores:
            place = {"task_type": "text-generation", "dataset_type": scores["text"], "dataset_name": scores["text"]}
            metrics = {"perplexity": "perplexity_candidate", "kl_divergence": "kl", "top1_agreement": "top1"}
            results = [EvalResult(**place, metric_type=m, metric_value=round(scores[k], 6)) for m, k in metrics.items()]
        data = ModelCardData(
            model_name=f"{source['name']} quantised" if results else None,
            eval_results=results,
            **{"library_name": "transformers", **carried},
            **({"base_model": source["repo"], "base_model_relation": "quantized"} if "repo" in source else {}),
            tags=self._tags(),
        )
        return data.to_yaml().strip()

    def _tags(self) -> list[str]:
        method = quantization_config(self.config).get("quant_method")
        elements = [str(r["scheme"]).partition("-")[0] for r in self.quantized]
        return list(dict.fromkeys(["quantkit", *([str(method)] if method else []), *elements]))

    def _head(self) -> str:
        source = self.manifest["source"]
        repo, name = source.get("repo"), source["name"]
        origin = f"[{repo}](https://huggingface.co/{repo})" if repo else f"`{name}`"
        revision = f" at revision `{source['revision']}`" if "revision" in source else ""
        schemes = sorted({r["scheme"] for r in self.quantized})
        lines = [
            f"# {name}, {', '.join(schemes) or 'with scales for an FP8 KV cache'}",
            f"{origin}{revision}, quantised by quantkit {self.manifest['quantkit']}."
            + (f" The model itself is described in [its own card]({SOURCE_CARD})." if self.source_card else ""),
        ]
        if run := self.manifest.get("calibration"):
            text, (count, length) = run["text"], run["text"]["samples"]
            digest = text["digest"][:16]
            lines.append(f"Calibrated on {count} x {length} tokens of {text['origin']} (digest `{digest}`).")
        return "\n\n".join(lines)

    def _roles(self) -> str:
        columns = ("role", "stored as", "method", "layers", "MB before", "MB", "bits per weight", "relative error")
        lines = ["## What was quantised", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for r in self.manifest["roles"]:
            stored = r["scheme"] or {"keep": "as published", "decode": "16 bits", "drop": "left out"}.get(r["fate"], "")
            bits = f"{8 * r['bytes_out'] / r['parameters']:.2f}" if r["parameters"] and r["bytes_out"] else ""
            lines.append(
                f"| {r['role']} | {stored} | {r['method'] if r['fate'] == 'quantize' else ''} | {r['layers']:,} "
                f"| {r['bytes_in'] / 1e6:,.2f} | {r['bytes_out'] / 1e6:,.2f} | {bits} | {self._error(r)} |"
            )
        parameters = sum(r["parameters"] for r in self.manifest["roles"] if r["fate"] != "drop")
        before, after = self.manifest["source"]["bytes"], self.manifest["bytes"]
        mean = 8 * after / max(parameters, 1)
        lines += ["", f"{before / 1e9:.3f} GB became {after / 1e9:.3f} GB, {mean:.2f} bits per weight."]
        if self.manifest["measured"]:
            lines[-1] += " The relative error is ||w - w'|| / ||w|| over the layers of the row."
        return "\n".join(lines)

    def _error(self, row: Mapping[str, Any]) -> str:
        """Relative error of the layers of a row together, as far as the run measured it."""
        layers, measured = self.manifest["layers"], self.manifest["measured"]
        same = ("role", "scheme", "method", "fate")
        sums = [m for n, m in measured.items() if n in layers and all(layers[n].get(k, "") == row[k] for k in same)]
        error = relative_error(math.fsum(s[0] for s in sums), math.fsum(s[1] for s in sums)) if sums else math.nan
        return f"{error:.4f}" if math.isfinite(error) else ""

    def _evaluation(self) -> str:
        s = self.evaluation
        if not s:
            return ""
        cache = ", with an FP8 KV cache" if s["kv"] else ""
        return "\n".join([
            "## Evaluation", "",
            f"{s['tokens']:,} tokens of {s['text']}{cache}, by `quantkit evaluate`:", "",
            "| | perplexity | KL to the source | same top token |", "|---|---|---|---|",
            f"| source | {s['perplexity_source']:.4f} | | |",
            f"| this checkpoint | {s['perplexity_candidate']:.4f} | {s['kl']:.5f} | {100 * s['top1']:.2f} % |",
        ])  # fmt: skip

    def _serving(self) -> str:
        kv = self.manifest.get("kv_scales") or []
        found = servings(self.config, {(r["role"], r["scheme"]) for r in self.quantized}, kv)
        lines = ["## Serving", "", "```sh", "MODEL=.  # the folder of these files, or the name of their repository"]
        for s in found:
            if s.command:
                lines += [f"{s.command}  # {NAMES[s.engine]}"]
        lines.append("```")
        if any(s.engine == "transformers" for s in found):
            lines += ["", "transformers: `AutoModelForCausalLM.from_pretrained(MODEL)`."]
        lines += ["", *(f"{NAMES[s.engine]} runs without the stored KV scales: {s.note}." for s in found if s.note)]
        if tp := self.manifest.get("tp"):
            lines += ["", f"Divides into tensor-parallel sizes {', '.join(map(str, tp))}."]
        lines += ["", "`quantkit verify . --manifest` compares every file with the SHA-256 in `quantkit.json`."]
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def card_text(folder: Path, manifest: Mapping[str, Any]) -> str:
    """The card of a checkpoint, whose other files are written."""
    own = folder / SOURCE_CARD
    source_card = own.read_text(encoding="utf-8", errors="replace") if own.is_file() else None
    return Card(manifest, read_json(folder / "config.json"), source_card).text()


def recard(folder: Path, evaluation: Path | None, base_model: str | None) -> None:
    """Write the card again, with scores or another name of the source; the manifest is written with it.

    Raises QuantkitError when the folder has no manifest of quantkit's, or the scores are those of another checkpoint.
    """
    manifest = manifest_of(folder)
    if manifest is None or "roles" not in manifest or manifest.get("format") == "as published":
        raise QuantkitError(
            "a card is made from the manifest, and this one does not say what was quantised", file=folder / MANIFEST,
            allowed="a checkpoint that this version of quantkit has quantised",
        )  # fmt: skip
    if evaluation is not None:
        manifest["evaluation"] = _scores(evaluation)
    if base_model is not None:
        if not REPO.fullmatch(base_model):
            raise QuantkitError("not a repository of the Hub", value=base_model, allowed="ORG/NAME")
        manifest["source"]["repo"] = base_model
    data = card_text(folder, manifest).encode()
    manifest["files"][CARD] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    for name, content in (
        (CARD, data),
        (MANIFEST, (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode()),
    ):
        new = folder / f".{name}.new"
        new.write_bytes(content)
        new.replace(folder / name)


def _scores(file: Path) -> dict[str, Any]:
    """The scores of `evaluate --json`, without what belongs to the machine: paths, seconds, memory."""
    data = read_json(file)
    missing = [k for k in SCORES if not isinstance(data, dict) or k not in data]
    if missing:
        raise QuantkitError("not the result of `quantkit evaluate --json`", file=file, value=f"no {', '.join(missing)}")
    return {**{k: data[k] for k in SCORES}, "text": Path(str(data["text"])).name}


def front_matter(card: str | None) -> dict[str, Any]:
    """The YAML between the `---` lines of a card; empty where there is none, or none that can be read."""
    match = re.match(r"\s*---\s*\n(.*?)\n---\s*(\n|$)", card or "", re.DOTALL)
    try:
        data = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return {}
    return data if isinstance(data, dict) else {}
