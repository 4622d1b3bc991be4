"""Try what `make dist` built as those who take it would: `python -m tools.dist FOLDER`.

The wheel is installed in an empty environment and run there, outside the checkout. The sdist must hold every file that
git tracks; it is unpacked, and its tests are collected and some of them run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Try the one wheel and the one sdist of a folder, in a folder that is gone afterwards."""
    folder = Path(sys.argv[1]).resolve()
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as elsewhere:
        try_sdist(sdist, Path(elsewhere))
        try_wheel(wheel, Path(elsewhere))
    print(f"{wheel.name} and {sdist.name} are well.")


def try_sdist(sdist: Path, elsewhere: Path) -> None:
    """Compare an sdist with the checkout, and run tests of documents and public names in it."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(elsewhere, filter="data")
    missing = tracked() - names
    if missing:
        raise SystemExit(f"{sdist.name} lacks {', '.join(sorted(missing))}: see MANIFEST.in")
    unpacked = elsewhere / sdist.name.removesuffix(".tar.gz")
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not compiled"]
    run([*pytest, "--collect-only", "-qq"], unpacked, quiet=True)
    run([*pytest, "tests/test_docs.py", "tests/test_public.py", "-k", "not example"], unpacked)


def try_wheel(wheel: Path, elsewhere: Path) -> None:
    """Install a wheel in an empty environment, and run the demo and a quick check there."""
    home = elsewhere / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    run([python, "-m", "pip", "install", "--quiet", "--no-compile", "--constraint", constraints, wheel], elsewhere)
    found = run([python, "-c", "import flashstate; print(flashstate.__file__)"], elsewhere, quiet=True)
    if home not in Path(found.strip()).parents:
        raise SystemExit(f"not the wheel's flashstate is imported: {found}")
    program = home / "bin" / "flashstate"
    run([program, "--version"], elsewhere)
    run([program, "info"], elsewhere, quiet=True)
    run([program, "demo", "--device", "cpu"], elsewhere)
    run([program, "check", "--device", "cpu", "--quick"], elsewhere)


def tracked() -> set[str]:
    """The files that git tracks here and that exist; none outside a checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}


def run(command: Sequence[str | Path], cwd: Path, *, quiet: bool = False) -> str:
    """Run a command away from this checkout, and return what was kept back of its output; SystemExit where it fails."""
    words = [*map(str, command)]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment["TRITON_INTERPRET"] = "1" if "pytest" in words else "0"
    result = subprocess.run(words, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE if quiet else None)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(words)} ended with {result.returncode}\n{result.stdout or ''}")
    return result.stdout or ""


if __name__ == "__main__":
    main()
