"""The recipes that come with quantkit, as text: listing them parses no YAML and imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from quantkit.kernels.errors import QuantkitError


def shipped() -> Iterator[tuple[str, str]]:
    """(name, first comment line) of every shipped recipe, those of single models last."""
    root = resources.files("quantkit.recipes")
    for folder, prefix in ((root, ""), (root / "models", "models/")):
        for file in sorted(folder.iterdir(), key=lambda f: f.name):
            if file.name.endswith(".yaml"):
                line = file.read_text(encoding="utf-8").partition("\n")[0]
                yield prefix + file.name.removesuffix(".yaml"), line.lstrip("# ").strip()


def read_recipe(source: str) -> tuple[str, str]:
    """(where it is, text) of a shipped recipe, of a file by its `.yaml` path, or of `modelopt:NAME` in our terms."""
    if source.startswith("modelopt:"):
        import yaml
        from quantkit.quantize.modelopt_recipes import modelopt_recipe

        return source, yaml.safe_dump(modelopt_recipe(source), sort_keys=False)
    if source.endswith((".yaml", ".yml")):
        try:
            return source, Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise QuantkitError(f"cannot read the recipe: {e}", file=source) from e
    names = [name for name, _ in shipped()]
    if source not in names:
        close = [n for n in names if source in n or n in source]
        raise QuantkitError(
            "no such recipe",
            value=source,
            allowed=", ".join(names),
            hint=f"did you mean {close[0]}?" if close else "a recipe of your own is a path that ends in .yaml",
        )
    file = resources.files("quantkit.recipes")
    for piece in f"{source}.yaml".split("/"):
        file = file / piece
    return source, file.read_text(encoding="utf-8")
