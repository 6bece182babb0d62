"""Run tests as on a Mac, as far as Linux can: `python3 tests/rigs/as_mac.py [WORDS OF PYTEST…]`.

In a mount namespace of their own, /proc is empty, `ps` and `lsof` are those of mac_ps.py, and the
locale writes a comma where English has a point. Where the words name no file: what `.ci/run` asks.
It needs root or user namespaces, and fails, loudly, where it has neither. What of a Mac is not here:
CONTRIBUTING.
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
TESTS = ["tests", "--ignore=tests/live", "-k", "test_processes or not slow"]
# Our `ps` and `lsof` where a test with a PATH of its own finds them too, the real /proc elsewhere,
# then an empty one in its place; words go on as they are.
SCRIPT = """\
mount -t overlay none -o "lowerdir=$SUBAGENT_FLEET_PROC/../bin:/usr/bin" /usr/bin &&
mount --rbind /proc "$SUBAGENT_FLEET_PROC" && mount -t tmpfs none /proc && ulimit -n 1024 &&
exec "$@"
"""


def unshare():
    """The words that give a mount namespace, or none."""
    for words in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
        try:
            if subprocess.call([*words, "true"], stderr=subprocess.DEVNULL) == 0:
                return words
        except OSError:
            break
    return []


def main(words):
    """Run pytest where the system looks like a Mac."""
    start = unshare()
    if not start:
        sys.exit("error: no mount namespace can be made here (neither root nor user namespaces), "
                 "so NOTHING WAS TESTED as on a Mac")
    place = pathlib.Path(tempfile.mkdtemp(prefix="subagent-fleet-mac-"))
    try:
        (place / "proc").mkdir()
        (place / "bin").mkdir()
        for name in ("ps", "lsof"):
            program = place / "bin" / name
            program.write_text(
                f"#!{sys.executable} -ISs\n"
                f"__import__('os').environ['SUBAGENT_FLEET_PROC'] = {str(place / 'proc')!r}\n"
                f"{(HERE / 'mac_ps.py').read_text(encoding='utf-8')}", encoding="utf-8")
            program.chmod(0o755)
        environment = dict(os.environ, SUBAGENT_FLEET_PROC=str(place / "proc"))
        environment.pop("LC_ALL", None)
        if not any((HERE.parents[1] / word.partition("::")[0]).exists() for word in words):
            words = [*TESTS, *words]
        kept = os.environ.get("SUBAGENT_FLEET_TEST_CACHE")  # what failed, for `--last-failed`
        cache = ["-o", f"cache_dir={kept}"] if kept else ["-p", "no:cacheprovider"]
        command = [*start, "sh", "-c", SCRIPT, "sh", sys.executable, "-m", "pytest", "-q", *cache,
                   *words]
        return subprocess.call(command, cwd=str(HERE.parents[1]), env=environment)
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
