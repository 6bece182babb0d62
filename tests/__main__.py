"""Build, then run the tests: `python3 tests` after each change, `python3 tests all`, `python3 tests live`.

The first leaves out what is marked `slow`, `all` runs that, too (kills, soaks, whole processes),
`live` asks the real programs. None but `live` uses any network but loopback. Further words go to
pytest. Takes pytest where it is; else makes itself a private environment with it, beside the
user's caches.
"""
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
TIERS = "all live".split()


def cache_place():
    """Where the tests keep what they make for themselves."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return cache / "subagent-fleet-tests"


def python_with_pytest():
    """Return an interpreter that has pytest."""
    if has_module(sys.executable, "pytest"):
        return sys.executable
    place = cache_place() / "py{}.{}".format(*sys.version_info)
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python3")
    if not (python.exists() and has_module(python, "pytest")):
        print(f"pytest is not here; making an environment with it in {place}", file=sys.stderr)
        subprocess.check_call([sys.executable, "-m", "venv", "--clear", str(place)])
        subprocess.check_call([str(python), "-m", "pip", "install", "-q", "pytest",
                               "pytest-xdist"])
    return str(python)


def has_module(python, name):
    """Tell whether an interpreter can import a module."""
    return subprocess.call([str(python), "-c", f"import {name}"], stderr=subprocess.DEVNULL) == 0


def main(words):
    """Build the file, run pytest on one tier; further words go to pytest."""
    if subprocess.call([sys.executable, str(HERE.parent / "src/build.py")]):
        return 1
    tier = words[0] if words[:1] and words[0] in TIERS else "fast"
    words = words if tier == "fast" else words[1:]
    where = [str(HERE / "live")] if tier == "live" else [str(HERE), f"--ignore={HERE / 'live'}"]
    if any((HERE.parent / word.partition("::")[0]).exists() for word in words if word):
        where = []
    if tier == "fast":
        where += ["-m", "not slow"]
    # What pytest makes of the test files is kept, or it takes seven seconds of each process; not
    # in the checkout.
    environment = dict(os.environ, PYTHONPYCACHEPREFIX=str(cache_place() / "bytecode"))
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        python = python_with_pytest()
        command = [python, "-m", "pytest", "-q"]
        # Where a run keeps what failed, for `--last-failed`; nothing is kept in the checkout.
        kept = os.environ.get("SUBAGENT_FLEET_TEST_CACHE")
        command += ["-o", f"cache_dir={kept}"] if kept else ["-p", "no:cacheprovider"]
        if tier != "live" and not words and has_module(python, "xdist"):
            # One more than there are processors: some of these tests wait.
            command += ["-n", str((os.cpu_count() or 1) + 1)]
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: no pytest, and none could be installed ({error})\n"
                 "  fix: python3 -m pip install pytest")
    return subprocess.call(command + where + words, cwd=str(HERE.parent), env=environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
