"""What `.github/release.py` refuses and fills in; the build itself is run in the live tier."""
import hashlib
import importlib.util
import subprocess
import sys

import pytest

import subagent_fleet as sf
from tools import ROOT

SCRIPT = ROOT / ".github" / "release.py"
CHANGELOG = "# Changelog\n\n## 2.0.0 (soon)\n\nNew.\n\n## 1.0.0\n\nFirst.\nMore.\n\n## 0.9.0\n\n\n"


@pytest.fixture(scope="module")
def release():
    spec = importlib.util.spec_from_file_location("release", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_is_the_files_own(release):
    assert release.read_version((ROOT / "subagent_fleet.py").read_text("utf-8")) == sf.__version__


@pytest.mark.parametrize("source", ["", "version = '1.0.0'\n", '__version__ = "1.0"\n',
                                    '# __version__ = "1.0.0"\n', '__version__ = "1.0.0.dev1"\n'])
def test_a_file_without_a_version_is_refused(release, source):
    with pytest.raises(release.Refused, match="__version__"):
        release.read_version(source)


def test_this_version_has_its_notes(release):
    text = (ROOT / ".github" / "CHANGELOG.md").read_text("utf-8")
    assert len(release.read_notes(text, sf.__version__)) > 40


@pytest.mark.parametrize("version, notes", [("2.0.0", "New.\n"), ("1.0.0", "First.\nMore.\n")])
def test_the_notes_are_the_versions_own(release, version, notes):
    assert release.read_notes(CHANGELOG, version) == notes


@pytest.mark.parametrize("version", ["0.9.0", "3.0.0", "1.0", ""])
def test_a_version_without_notes_is_refused(release, version):
    with pytest.raises(release.Refused, match="CHANGELOG"):
        release.read_notes(CHANGELOG, version)


@pytest.mark.parametrize("tag, version, fits", [
    ("v1.0.0", "1.0.0", True), ("", "1.0.0", True), ("1.0.0", "1.0.0", False),
    ("v1.0.1", "1.0.0", False), ("v1.0.0-rc1", "1.0.0", False)])
def test_a_tag_must_be_the_versions(release, tag, version, fits):
    if fits:
        release.check_tag(tag, version)
    else:
        with pytest.raises(release.Refused, match="tag"):
            release.check_tag(tag, version)


def test_the_formula_is_filled_in(release):
    template = (ROOT / ".github" / "formula.rb").read_text("utf-8")
    formula = release.render_formula(template, "1.2.3", b"the file")
    assert f'sha256 "{hashlib.sha256(b"the file").hexdigest()}"' in formula
    assert 'version "1.2.3"' in formula
    assert 'url "https://github.com/adityak74/subagent-fleet/releases/download/v1.2.3/' \
           'subagent_fleet.py"' in formula
    with pytest.raises(release.Refused, match="mark"):
        release.render_formula(template + "@NEW@", "1.2.3", b"")


def test_the_sums_are_of_every_file_but_their_own(release, tmp_path):
    for name in ("b", "a", "SHA256SUMS"):
        (tmp_path / name).write_bytes(name.encode())
    assert release.render_sums(tmp_path) == "".join(
        f"{hashlib.sha256(name.encode()).hexdigest()}  {name}\n" for name in ("a", "b"))


@pytest.fixture
def checkout(tmp_path):
    copy = tmp_path / "copy"
    (copy / ".github").mkdir(parents=True)
    for name in ("subagent_fleet.py", ".github/release.py"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(["git", "init", "-q", str(copy)], check=True)
    return copy


def run_release(checkout, *words):
    return subprocess.run([sys.executable, str(checkout / ".github/release.py"), *words],
                          capture_output=True, text=True)


def test_a_checkout_with_changes_is_refused(checkout, tmp_path):
    done = run_release(checkout, "--out", str(tmp_path / "out"))
    assert done.returncode == 1 and "not committed" in done.stderr
    assert not (tmp_path / "out").exists()


# -- the plugin that is committed --

SKILL = ".agents/plugins/subagent-fleet/skills/subagent-fleet-bootstrap/SKILL.md"


def commit_all(checkout):
    for words in (("add", "-A"), ("-c", "user.name=n", "-c", "user.email=e@x", "commit", "-qm", "all")):
        subprocess.run(["git", "-C", str(checkout), *words], check=True)


def test_a_plugin_of_another_file_is_refused_with_the_line_that_pins_it(checkout):
    assert run_release(checkout, "--pin").returncode == 0
    with open(checkout / "subagent_fleet.py", "ab") as stream:
        stream.write(b"# newer\n")
    commit_all(checkout)
    done = run_release(checkout, "--out", str(checkout.parent / "out"))
    assert done.returncode == 1 and SKILL in done.stderr
    assert "  fix: python3 .github/release.py --pin && git commit -am '" in done.stderr
    assert not (checkout.parent / "out").exists()


def test_pinning_writes_the_checksum_and_the_version_of_the_file(release, checkout):
    with open(checkout / "subagent_fleet.py", "ab") as stream:
        stream.write(b"# newer\n")
    told = run_release(checkout, "--pin").stdout
    text = (checkout / SKILL).read_text("utf-8")
    assert hashlib.sha256((checkout / "subagent_fleet.py").read_bytes()).hexdigest() in text
    assert f"download/v{sf.__version__}/subagent_fleet.py" in text and SKILL in told
    assert "of this" in run_release(checkout, "--pin").stdout
    release.check_pin(checkout)


def test_the_committed_plugin_is_whole_but_for_the_checksum(release):
    plugin = release.render_plugin((ROOT / "subagent_fleet.py").read_bytes())
    assert set(release.find_stale(ROOT, plugin)) <= {SKILL}
