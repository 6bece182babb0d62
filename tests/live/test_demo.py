"""`demo` and `trace` where there is no network but loopback."""
import rig
from tools import SCRIPT


def test_demo_needs_no_network(trap, tmp_path):
    project = rig.Project(tmp_path / "demo", SCRIPT, trap)
    said = project.run("demo")
    assert "As planned" in said and "nothing left the house" in said
    assert [path.name for path in project.folder.iterdir()] == []
    assert [path.name for path in project.home.iterdir()] == []
