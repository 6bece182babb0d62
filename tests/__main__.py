"""Run the tests: `python3 tests` (no network but loopback), `python3 tests live` (real programs).

Takes pytest where it is; else makes itself a private environment with it, beside the user's caches.
"""
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


def python_with_pytest():
    """Return an interpreter that has pytest."""
    if subprocess.call([sys.executable, "-c", "import pytest"], stderr=subprocess.DEVNULL) == 0:
        return sys.executable
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    place = cache / "subagent-fleet-tests" / "py{}.{}".format(*sys.version_info)
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python3")
    if subprocess.call([str(python), "-c", "import pytest"], stderr=subprocess.DEVNULL) \
            if python.exists() else True:
        print(f"pytest is not here; making an environment with it in {place}", file=sys.stderr)
        subprocess.check_call([sys.executable, "-m", "venv", "--clear", str(place)])
        subprocess.check_call([str(python), "-m", "pip", "install", "-q", "pytest"])
    return str(python)


def has_xdist(python):
    """Tell whether tests can run in several processes."""
    return subprocess.call([python, "-c", "import xdist"], stderr=subprocess.DEVNULL) == 0


def main(words):
    """Run pytest on one tier; further words go to pytest."""
    live = words[:1] == ["live"]
    where = [str(HERE / "live")] if live else [str(HERE), f"--ignore={HERE / 'live'}"]
    words = words[1:] if live else words
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
    try:
        python = python_with_pytest()
        command = [python, "-m", "pytest", "-q"]
        # Where a run keeps what failed, for `--last-failed`; nothing is kept in the checkout.
        kept = os.environ.get("SUBAGENT_FLEET_TEST_CACHE")
        command += ["-o", f"cache_dir={kept}"] if kept else ["-p", "no:cacheprovider"]
        if not live and not words and has_xdist(python):
            # One more than there are processors: most of these tests wait.
            command += ["-n", str((os.cpu_count() or 1) + 1)]
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: no pytest, and none could be installed ({error})\n"
                 "  fix: python3 -m pip install pytest")
    return subprocess.call(command + where + words, cwd=str(HERE.parent), env=environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
