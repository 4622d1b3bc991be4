"""What a user installs and imports: the names, the files, the version, and the map of the tree."""

import inspect
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import flashstate

ROOT = Path(__file__).parent.parent

# Without Triton, which a CPU does not need, nor what is only for those who ask for it.
STEPS = """
import sys
sys.modules["triton"] = None  # importing it fails
import torch
from flashstate.state.state import State  # alone, as pickle imports it
assert State(torch.ones(2, 1, 4, 8)).read(1).sum() == 32
import flashstate.public, flashstate.commands
state, x, dt, A = torch.zeros(2, 1, 4, 8), torch.ones(2, 1, 4), torch.ones(2, 1), -torch.ones(1)
B = torch.ones(2, 1, 8)
y = flashstate.mamba2_step(state, x, dt, A, B, B)
assert bool((y > 0).all() and (state > 0).all())
rooms = {".".join(name.split(".")[:2]) for name in sys.modules}
assert not rooms & {"flashstate.compat", "flashstate.integrations", "flashstate.kernels"}, rooms
assert "transformers" not in sys.modules
from flashstate.compat import fla, flashinfer, mamba_ssm, sglang, vllm
state, x, dt, A = torch.zeros(2, 4, 8), torch.ones(2, 4), torch.ones(2, 4), -torch.ones(4, 8)
B, D = torch.ones(2, 8), torch.ones(4)
mamba_ssm.selective_state_update(state, x, dt, A, B, B)
flashinfer.selective_state_update(state, x, dt, A, B, B, D)
vllm.selective_state_update(state, x, dt, A, B, B, D, D)
assert not any(name.startswith("flashstate.kernels") for name in sys.modules)
"""


def pyproject() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_public_names_are_exactly_all() -> None:
    public = {
        name
        for name, value in vars(flashstate).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public == set(flashstate.__all__)
    assert public.isdisjoint(path.stem for path in (ROOT / "flashstate").iterdir()), "an import would hide the name"
    with pytest.raises(AttributeError, match="module 'flashstate' has no attribute 'nothing'"):
        getattr(flashstate, "nothing")  # noqa: B009


def test_every_public_name_has_a_docstring_of_its_own() -> None:
    for name in flashstate.__all__:
        doc = inspect.getdoc(getattr(flashstate, name))
        assert doc, name
        assert not doc.startswith(f"{name}("), "this is the signature that dataclass makes up"


def test_the_import_and_steps_on_a_cpu_work_without_triton_and_import_nothing_that_was_not_asked_for() -> None:
    result = subprocess.run([sys.executable, "-c", STEPS], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_file_of_the_package_is_built_into_it() -> None:
    patterns = pyproject()["tool"]["setuptools"]["package-data"]["flashstate"]
    package = ROOT / "flashstate"
    data = {file for pattern in patterns for file in package.glob(pattern)}
    files = {ROOT / name for name in files_of_the_tree() if name.startswith("flashstate/")}
    missed = {file for file in files - data if file.suffix != ".py"}
    assert not missed, f"not in package-data: {missed}"
    assert package / "py.typed" in data
    homeless = {file for file in files if file.suffix == ".py" and not (file.parent / "__init__.py").exists()}
    assert not homeless, f"not in a package: {homeless}"


def test_the_version_is_the_same_everywhere() -> None:
    project, changelog = pyproject()["project"], (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert metadata.version("flashstate") == project["version"]
    assert re.findall(r"^## \[(\d[^\]]*)\]", changelog, re.MULTILINE)[0] == project["version"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert {f"version: {project['version']}", f"license: {project['license']}"} <= set(citation)


def git(*arguments: str) -> str:
    """What git prints in the root of the tree; skips where this is not a checkout of its own."""
    try:
        result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("git is not installed, so the files of the tree are not known")
    if result.returncode != 0:
        pytest.skip(f"not in a git checkout: {result.stderr.strip()}")
    return result.stdout


def files_of_the_tree() -> set[str]:
    """Every file git tracks or would track, relative to the root."""
    if Path(git("rev-parse", "--show-toplevel").strip()).resolve() != ROOT.resolve():
        pytest.skip("not in a git checkout of its own: the tree lies inside another repository")
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return {name for name in listed if name and (ROOT / name).is_file()}


def map_of_the_tree() -> set[str]:
    """The paths in the block of CONTRIBUTING.md: rooms, which end with a slash, and files that stand beside them."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    entries: list[str] = []
    parents: list[str] = []
    for line in block.splitlines():
        indent = len(line) - len(line.lstrip(" "))
        names, _, description = line.strip().partition("  ")
        if indent > 2 * len(parents):  # the line before goes on
            continue
        assert description.strip(), f"{names} is not described"
        parents = parents[: indent // 2]
        entries += ["".join(parents) + name for name in names.split()]
        parents += [names] if names.endswith("/") else []
    assert len(set(entries)) == len(entries), "something is on the map twice"
    return set(entries)


def test_the_map_in_contributing_is_the_tree() -> None:
    """Every room, and every file that stands beside rooms in the package."""
    files = files_of_the_tree()
    rooms = {f"{parent}/" for name in files for parent in map(str, Path(name).parents) if parent != "."}
    beside = {name for name in files if re.fullmatch(r"flashstate/[^/]+", name)}
    tree, mapped = rooms | beside, map_of_the_tree()
    assert mapped == tree, f"not on the map: {sorted(tree - mapped)}; not in the tree: {sorted(mapped - tree)}"


def test_every_file_says_in_its_first_line_what_it_is() -> None:
    for name in files_of_the_tree():
        if name.endswith(".py"):
            assert (ROOT / name).read_text(encoding="utf-8").startswith('"""'), name
