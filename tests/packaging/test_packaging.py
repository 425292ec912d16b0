"""The package as users get it: names, floors, a wheel with real files, and imports that stay light."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

import overspill

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("configs", "kernels", "model_selection", "offload", "swap_scheduler", "trainer")


def run_python(code: str, cwd: Path = ROOT) -> str:
    """What a new interpreter prints for `code`; this one has long imported torch."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_kernels_does_not_answer_for_hugging_faces_package() -> None:
    found = run_python("from importlib.util import find_spec; s = find_spec('kernels'); print(s.origin if s else None)")
    assert found == "None" or not Path(found).is_relative_to(ROOT / "kernels")


@pytest.mark.parametrize("floor", FLOORS)
def test_each_floor_is_part_of_overspill(floor: str) -> None:
    spec = find_spec(f"overspill.{floor}")
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == ROOT / floor / "__init__.py"


@pytest.mark.parametrize("floor", FLOORS)
def test_links_are_relative(floor: str) -> None:
    # An absolute link would work here and in no other checkout.
    assert (ROOT / "src" / "overspill" / floor).readlink() == Path("..", "..", floor)


@pytest.mark.parametrize("module", ["overspill", "overspill.kernels", "overspill.swap_scheduler"])
def test_imports_stay_light(module: str) -> None:
    heavy = ("torch", "triton", "numpy", "transformers")
    assert run_python(f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_every_scheduler_module_stays_light() -> None:
    names = [f"overspill.swap_scheduler.{path.stem}" for path in sorted((ROOT / "swap_scheduler").glob("[a-z]*.py"))]
    assert names
    heavy = ("torch", "triton", "numpy", "transformers")
    assert run_python(f"import sys, {', '.join(names)}; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_unknown_attribute_is_named() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        overspill.trane  # noqa: B018


def test_version_matches_the_installed_metadata() -> None:
    assert overspill.__version__ == version("overspill")


def test_public_names_are_listed() -> None:
    assert {"plan", "train", "__version__"} <= set(dir(overspill))


def test_wheel_holds_real_files_for_the_links(tmp_path: Path) -> None:
    # Built from a copy: setuptools leaves folders beside what it builds, and stale ones would leak into the wheel.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", *FLOORS):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=skip)

    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run(
        [*build, "-w", str(tmp_path), str(source)], capture_output=True, text=True, timeout=100, check=False
    )
    assert built.returncode == 0, built.stderr

    (wheel,) = tmp_path.glob("overspill-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    expected = {
        path.relative_to(ROOT)
        for floor in FLOORS
        for path in (ROOT / floor).rglob("*")
        if path.suffix in (".py", ".yaml") and "__pycache__" not in path.parts
    }
    missing = {path for path in expected if sizes.get(f"overspill/{path.as_posix()}") != (ROOT / path).stat().st_size}
    assert not missing
    assert "overspill/py.typed" in sizes
    assert all(name.startswith(("overspill/", "overspill-")) for name in sizes), "a floor leaked to the top level"
