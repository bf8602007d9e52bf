"""The rules of the house: what the wheel holds, who imports whom, how large files get, and what start-up may load.

    pytest tests/test_house.py

Every rule is tested on broken input as well where it could pass by looking at nothing.
"""

import ast
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import headers
import pytest

ROOT = Path(__file__).parents[1]
CODE = ("kernels", "calibrate", "export", "quantize")
PACKAGES = (*CODE, "recipes")
# quantize calls the other three; calibrate and export never import one another; kernels imports nothing of quantkit
MAY_IMPORT = {
    "kernels": {"kernels"},
    "calibrate": {"calibrate", "kernels"},
    "export": {"export", "kernels"},
    "quantize": {"quantize", "calibrate", "export", "kernels", "recipes"},
}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 60


def product_files() -> list[Path]:
    return [f for folder in CODE for f in sorted((ROOT / folder).rglob("*.py"))]


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


# ---- the wheel ----


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys; from scikit_build_core.build import build_wheel; print(build_wheel(sys.argv[1]))"
    ran = subprocess.run([sys.executable, "-c", build, folder], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    (file,) = folder.glob("*.whl")
    return file


def test_wheel_holds_the_five_folders_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if not n.endswith("/")]
    top = {n.split("/")[0] for n in names}
    info = {n for n in top if n.endswith(".dist-info")}
    assert len(info) == 1
    assert top - info == {"quantkit"}
    tree = {
        f"quantkit/{f.relative_to(ROOT).as_posix()}"
        for folder in PACKAGES
        for f in (ROOT / folder).rglob("*")
        if f.is_file() and "__pycache__" not in f.parts
    }
    assert {n for n in names if n.startswith("quantkit/")} == tree


def test_wheel_needs_no_torch_for_the_data_free_path(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    required = [n for n in lines if n.startswith("Requires-Dist:") and "extra ==" not in n]
    assert any(n.startswith("Requires-Dist: numba") for n in required)
    assert not [n for n in required if "torch" in n or "transformers" in n]


def test_recipes_of_the_wheel_are_read_as_resources(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    # -I -S: this interpreter sees the wheel and the standard library only, not what is installed beside it
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from importlib.resources import files\n"
        "root = files('quantkit.recipes')\n"
        "for f in [*root.iterdir(), *(root / 'models').iterdir()]:\n"
        "    if f.name.endswith('.yaml'): print(f.name, len(f.read_bytes()))\n"
    )
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    found = {name: int(size) for name, size in (line.split() for line in ran.stdout.splitlines())}
    assert found == {f.name: f.stat().st_size for f in (ROOT / "recipes").rglob("*.yaml")}
    assert "int4.yaml" in found


# ---- layout ----


def test_folders_are_no_packages_of_their_own():
    """An `__init__.py` in kernels/ would be imported as the Hugging Face package `kernels` from the repository root."""
    assert [f"{p}/__init__.py" for p in (*PACKAGES, "tests") if (ROOT / p / "__init__.py").exists()] == []
    assert not (ROOT / "conftest.py").exists()


@pytest.mark.parametrize("package", [*PACKAGES, "tests"])
def test_a_package_of_the_same_name_wins_from_the_repository_root(package, tmp_path):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("theirs = True\n")
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]; import {package}; assert {package}.theirs"
    subprocess.run([sys.executable, "-I", "-c", code], check=True)


def imported(tree: ast.AST, file: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a file, relative ones resolved; `from a import b` gives `a.b`."""
    package = ("quantkit", *file.relative_to(ROOT).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def wrong_imports(tree: ast.AST, file: Path) -> list[str]:
    folder = file.relative_to(ROOT).parts[0]
    wrong = []
    for line, name in imported(tree, file):
        first, *rest = name.split(".")
        if first == "quantkit" and (not rest or rest[0] not in MAY_IMPORT[folder]):
            wrong.append(f"{folder}/{file.name}:{line} imports {name}")
        if first in (*PACKAGES, "tests"):
            wrong.append(f"{folder}/{file.name}:{line} imports {name}, which is quantkit.{name}")
    return wrong


def test_imports_go_one_way():
    assert [w for f in product_files() for w in wrong_imports(parse(f), f)] == []


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("kernels/x.py", "from quantkit.export import formats"),
        ("kernels/cpu/x.py", "def f():\n    import quantkit.quantize.plan"),
        ("calibrate/x.py", "from quantkit.export.checkpoint import open_checkpoint"),
        ("export/x.py", "from ..calibrate import stats"),
        ("export/sources/x.py", "from quantkit import quantize"),
        ("quantize/x.py", "import kernels.scheme"),
    ],
)
def test_imports_against_the_direction_are_seen(file, code):
    assert wrong_imports(ast.parse(code), ROOT / file)


# ---- size ----


def test_files_and_functions_stay_small():
    large = []
    for file in product_files():
        lines = len(file.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            large.append(f"{file.relative_to(ROOT)}: {lines} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    large.append(
                        f"{file.relative_to(ROOT)}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"
                    )
    assert large == []


def test_no_test_is_skipped():
    """Markers choose (`-m vllm`); nothing is skipped or expected to fail."""
    banned = {"skip", "skipif", "skipTest", "SkipTest", "importorskip", "xfail"}
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.attr}"
        for file in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Attribute) and node.attr in banned
    ]
    assert found == []


# ---- start-up ----

RUN = """
import json, sys
from quantkit.quantize.cli.main import app
for command in json.loads(sys.argv[1]):
    try:
        app(command, standalone_mode=False)
    except SystemExit as e:
        if e.code: raise
print("modules:", json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def loaded_by(*commands: list[str]) -> set[str]:
    """Top-level modules that an interpreter holds after these commands."""
    code = [sys.executable, "-c", RUN, json.dumps(commands)]
    ran = subprocess.run(code, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return set(json.loads(ran.stdout.rpartition("modules:")[2]))


@pytest.mark.parametrize("command", [["--help"], ["recipes"], ["recipes", "int4"], ["quantize", "--help"]])
def test_help_and_recipes_load_nothing_heavy(command):
    loaded = loaded_by(command)
    assert "typer" in loaded
    assert loaded & {"torch", "transformers", "numba", "numpy", "huggingface_hub", "safetensors"} == set()


def test_data_free_run_never_imports_torch(tmp_path):
    source = headers.write(tmp_path / "source", headers.miniature("GLM-5.2"), "bf16", seed=0)
    commands = [["inspect", str(source)]]
    for recipe in ("int4", "nvfp4", "mxfp4-experts", "fp8-block", "keep"):
        out = str(tmp_path / recipe)
        options = ["-r", recipe, *(["--group", "64"] if recipe == "int4" else [])]
        commands += [["plan", str(source), *options], ["quantize", str(source), *options, "-o", out]]
        commands += [["verify", out, "--source", str(source)]]
    loaded = loaded_by(*commands)
    assert {"numba", "numpy"} <= loaded
    assert loaded & {"torch", "transformers"} == set()
    assert (tmp_path / "keep" / "config.json").exists()
