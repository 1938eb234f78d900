"""`.ci/run`, with a Python that makes virtual environments in which nothing happens."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launchers import ROOT

CHECKS = ["ruff check .", "ruff format --check .", "mypy"]
TESTS = ".venv/bin/python -m pytest"
PYTHON = """\
#!/bin/sh
mkdir -p "$3/bin"
for name in pip ruff mypy python; do cp "{tool}" "$3/bin/$name"; done
"""
TOOL = """\
#!/bin/sh
echo "$0 $*" >> "{log}"
[ "$(basename "$0")${{1:+ $*}}" != "$FAILS" ]
"""


def run(folder: Path, fails: str = "") -> tuple[int, list[str]]:
    """Its exit code where one command fails, and what it ran."""
    (folder / "bin").mkdir()
    (folder / "tmp").mkdir()
    for name, text in (("python3", PYTHON), ("tool", TOOL)):
        path = folder / "bin" / name
        path.write_text(text.format(tool=folder / "bin/tool", log=folder / "log"))
        path.chmod(0o755)
    checkout = folder / "checkout"
    shutil.copytree(ROOT / ".ci", checkout / ".ci")
    shutil.copy(ROOT / "README.md", checkout)
    more = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(folder / "tmp")}
    done = subprocess.run([checkout / ".ci/run"], env=os.environ | more | {"FAILS": fails})
    return done.returncode, (folder / "log").read_text().splitlines()


def test_it_checks_in_an_environment_of_its_own_and_then_tests(tmp_path: Path) -> None:
    code, ran = run(tmp_path)
    assert code == 0 and not list((tmp_path / "tmp").iterdir()), "it is gone afterwards"
    checks = [line.partition("/bin/")[2] for line in ran if not line.startswith(".venv/")]
    assert [line.strip() for line in checks if not line.startswith("pip")] == CHECKS
    (environment,) = {line.partition("/bin/")[0] for line in ran if ".[dev]" in line}
    assert all([line.startswith((f"{environment}/bin/", ".venv/bin/")) for line in ran])
    assert ran[-1] == TESTS and all([".venv/" not in line for line in ran[: len(CHECKS) + 2]])


@pytest.mark.parametrize("check", CHECKS)
def test_a_finding_ends_it_before_the_tests(check: str, tmp_path: Path) -> None:
    code, ran = run(tmp_path, check)
    assert code != 0 and ran[-1].rstrip().endswith(check) and TESTS not in ran
