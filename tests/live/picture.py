#!/usr/bin/env python3
"""Make README's pictures of the dashboard, light and dark: five minutes of simulated machines."""

import argparse
import contextlib
import pathlib
import random
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT / "tests/rigs"), str(ROOT)]

import subagent_fleet as sf  # noqa: E402 - found by the path above
import test_dashboard as live  # noqa: E402
from chromium import Browser  # noqa: E402

SECONDS = 290
PACES = {"laptop": sf.Pace(prompt_rate=2500, answer_rate=41),
         "mini": sf.Pace(prompt_rate=1800, answer_rate=58),
         "gpu": sf.Pace(prompt_rate=1500, answer_rate=30)}
# How long who asks thinks in between.
PAUSES = {"": (12, 25), "a1": (20, 45), "a2": (1, 8), "a3": (2, 10), "a4": (10, 30)}


def ask_on(scene, agent, alias):
    while scene.is_asking:
        scene.ask(agent, alias)
        time.sleep(random.uniform(*PAUSES[agent]))


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ending:
        place = pathlib.Path(name)
        (place / "fleet").mkdir()
        scene = ending.enter_context(contextlib.closing(live.Scene(place / "fleet")))
        browser = ending.enter_context(contextlib.closing(Browser(place / "chromium")))
        for node, pace in PACES.items():
            scene.nodes[node].pace = pace
        page = browser.open(scene.url, height=1000)
        scene.is_asking = True
        for agent, _, alias in live.ASKERS:
            threading.Thread(target=ask_on, args=(scene, agent, alias), daemon=True).start()
        time.sleep(SECONDS / 2)
        scene.nodes["gpu"].fall_asleep()
        time.sleep(SECONDS / 8)
        scene.nodes["gpu"].wake()
        scene.nodes["gpu"].loaded["devstral:24b"] = 32768
        time.sleep(SECONDS / 8 * 3)
        page.wait("document.querySelectorAll('#routes .works').length >= 4", 120)
        for theme, file in (("light", "dashboard.png"), ("dark", "dashboard-dark.png")):
            page.look(width=1440, height=1000, theme=theme)
            time.sleep(1.5)
            page.shot(ROOT / ".github" / file, height=1000)
        scene.is_asking = False


if __name__ == "__main__":
    main()
