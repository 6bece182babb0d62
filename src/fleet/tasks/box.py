"""What a task's commands may write, as arguments of the program that confines them."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.start.gate import LatePattern
from fleet.start.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


# A command of a task can read everything and use the network, but it writes only where its Box
# allows it. The same rules become mounts for bubblewrap (Linux) or lines of a profile for
# sandbox-exec (macOS). In both, the last rule for a path counts. Example, for a task `docs`:
#   ~/.cache: yes · ~/.claude: yes · ~/.claude/settings.json: no · the task's own directory: yes
#   every path that no rule names: no


class Grant(Record):
    """Whether a path, and what is below it, may be written."""

    path: str
    may_write: bool


class Box(Record):
    """What a command gets: its working directory, the paths it may write, a temporary directory."""

    tree: str
    grants: Sequence[Grant]  # the last one for a path counts
    temporary: str = ""
    shown: tuple[str, ...] = ()  # what it needs to see below the system's /tmp


class Kept(Record):
    """A directory where a program keeps its files, and the settings among them.

    Settings may name programs that the person's next session runs, so they stay read-only.
    """

    variable: str  # the variable that names another directory, or ""
    usual: str  # below home, or ""
    settings: tuple[str, ...] = ()
    inner: str = ""  # the program's own part of it


USUAL_CACHES = (
    Kept("XDG_CACHE_HOME", ".cache"), Kept("", "Library/Caches"),
    Kept("UV_CACHE_DIR", ""), Kept("PIP_CACHE_DIR", ""), Kept("npm_config_cache", ".npm"),
    Kept("CARGO_HOME", ".cargo",
         ("bin", "config", "config.toml", "credentials", "credentials.toml", "env")),
    Kept("GOMODCACHE", "go/pkg"), Kept("", ".m2/repository"), Kept("", ".yarn/berry"),
    Kept("GRADLE_USER_HOME", ".gradle", ("init.d", "init.gradle", "gradle.properties")),
    Kept("NUGET_PACKAGES", ".nuget/packages"), Kept("", ".bun/install/cache"),
    Kept("", ".local/share/pnpm/store"), Kept("", ".composer/cache"), Kept("", ".bundle/cache"),
    Kept("CCACHE_DIR", ".ccache"), Kept("HEX_HOME", ".hex"),
    Kept("", "Library/Developer/Xcode/DerivedData"))
CODER_STATE = {
    # Not ~/.claude.json: without its lock beside it, agents would write over each other; and
    # it names servers to start. Claude Code does without (2.1.328).
    "claude": (Kept("CLAUDE_CONFIG_DIR", ".claude",
                    (".claude.json", "settings.json", "settings.local.json", "CLAUDE.md",
                     "agents", "commands", "hooks", "output-styles", "plugins", "rules",
                     "skills")),),
    "codex": (Kept("CODEX_HOME", ".codex",
                   ("config.toml", "AGENTS.md", "agents", "hooks.json", "models.json",
                    "prompts", "rules")),),
    "opencode": (Kept("XDG_DATA_HOME", ".local/share", inner="opencode"),
                 Kept("XDG_STATE_HOME", ".local/state", inner="opencode"),
                 Kept("XDG_CONFIG_HOME", ".config",
                      ("opencode.json", "opencode.jsonc", "AGENTS.md", "agent", "agents",
                       "command", "commands", "plugin", "plugins", "tool", "tools"),
                      inner="opencode")),
    "aider": (Kept("", ".aider"),),
    "qwen": (Kept("QWEN_HOME", ".qwen",
                  ("settings.json", "QWEN.md", "agents", "commands", "extensions",
                   "skills")),)}


def places_of(rows: Iterable[Kept], home: str, environ: Mapping[str, str]
               ) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (directory, names of settings in it) for rows in an environment."""
    for row in rows:
        base = environ.get(row.variable, "")
        if not base.startswith("/"):
            base = f"{home}/{row.usual}" if row.usual else ""
        if base:
            yield (f"{base}/{row.inner}" if row.inner else base), row.settings


def is_below(path: str, directory: str) -> bool:
    """Tell whether a path is a directory or lies in it."""
    return f"{path}/".startswith(f"{directory.rstrip('/')}/")


def may_write(grants: Sequence[Grant], path: str) -> bool:
    """Tell whether a path may be written."""
    return next((grant.may_write for grant in reversed(grants)
                 if is_below(path, grant.path)), False)


def find_shown(values: Iterable[str]) -> tuple[str, ...]:
    """Return the named paths below the system's /tmp, which a command would otherwise not see."""
    parts = {part.rstrip("/") for value in values for part in value.split(":")
             if re.match(r"/tmp/[^/]", part) and "/../" not in f"{part}/"}
    return tuple(sorted(path for path in parts if not any(
        path != other and is_below(path, other) for other in parts)))


# -- bubblewrap --

# bubblewrap ends with its parent: this shell, which lives as long as the command. On TERM the
# shell waits for the command, which gets the signal, too. Supervisors may come and go.
BWRAP_PARENT = 'trap "exit 143" TERM; "$@"; exit $?'
BWRAP = "bwrap"
# The capabilities that root keeps. With all of them, a command could mount its way out.
ROOT_CAPABILITIES = ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL",
                     "CAP_SETGID", "CAP_SETUID", "CAP_NET_BIND_SERVICE")


def plan_bwrap(program: str, box: Box, *, is_root: bool = False) -> list[str]:
    """Return the words that run a command with bubblewrap in a box."""
    words = [program, "--die-with-parent", "--unshare-pid", "--ro-bind", "/", "/",
             "--dev", "/dev", "--proc", "/proc", "--ro-bind-try", "/proc/sys", "/proc/sys",
             "--bind", box.temporary, "/tmp"]
    for path in box.shown:
        words += ["--ro-bind-try", path, path]
    for grant in box.grants:
        bind = "--bind-try" if grant.may_write else "--ro-bind-try"
        if is_below(grant.path, "/dev"):
            bind = "--dev-bind-try"
        words += [bind, grant.path, grant.path]
    if is_root:
        words += ["--cap-drop", "ALL"]
        for name in ROOT_CAPABILITIES:
            words += ["--cap-add", name]
    return [*words, "--chdir", box.tree, "--"]


# -- sandbox-exec --

SEATBELT = "sandbox-exec"
_SEATBELT_HEAD = """\
(version 1)
(allow default)
(deny file-write*)
(allow file-write* (subpath "/dev/fd") (regex #"^/dev/(null|zero|ptmx|tty.*|dtracehelper)$"))
"""


def find_mac_temporary(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return where programs of macOS write temporary files, whatever TMPDIR says."""
    own = re.match(r"(?:/private)?(/var/folders/[^/]+/[^/]+)/", environ.get("TMPDIR", ""))
    return ("/private/tmp", "/private/var/tmp", *([f"/private{own[1]}"] if own else ()))


def plan_seatbelt(program: str, box: Box) -> list[str]:
    """Return the words that run a command with sandbox-exec in a box.

    Paths are parameters, so none has to be quoted for the profile.
    """
    profile = _SEATBELT_HEAD
    words = []
    for number, grant in enumerate((*box.grants, Grant(box.temporary, True))):
        verb = "allow" if grant.may_write else "deny"
        profile += f'({verb} file-write* (subpath (param "P{number}")))\n'
        words += ["-D", f"P{number}={grant.path}"]
    return [program, "-p", profile, *words, "--"]


# -- what a command was refused --

_PATH_WORDS = r"(?:~|[.][.])?/"
# As C, Go and shells say it (PATH: WHY), and as Python and Node do (WHY: 'PATH').
_REFUSAL = (r"""(?im)(?:['"`\u2018](%(path)s[^'"`\u2019\n]+)['"`\u2019]"""
            r"""|(?:^|[\s(])(%(path)s[^\s'"`:]+)):\s(?:%(why)s)"""
            r"""|(?:%(why)s)[:,]\s(?:\w+\s)?"""
            r"""['"](%(path)s[^'"\n]+)['"]""")
_REFUSALS = {
    BWRAP: LatePattern(_REFUSAL % {"path": _PATH_WORDS,
                                   "why": "read-only file ?system|EROFS"}),
    SEATBELT: LatePattern(_REFUSAL % {"path": _PATH_WORDS,
                                      "why": "operation not permitted|EPERM"})}
REFUSED_LIMIT = 10  # paths; a single cause can produce thousands


def find_refused(confiner: str, text: str, box: Box, home: str,
                 real_path: Callable[[str], str]) -> list[str]:
    """Return the paths that a command could not write because of its box, by its output.

    The text may be JSON.
    """
    found: dict[str, None] = {}
    text = text.replace("\\n", "\n").replace('\\"', '"')
    for match in _REFUSALS[confiner].finditer(text):
        path = next(filter(None, match.groups()))
        if path.startswith("~"):
            path = home + path[1:]
        elif path.startswith(".."):
            path = f"{box.tree}/{path}"
        path = real_path(path)
        if not may_write(box.grants, path) and not re.match("/(proc|sys|dev)/", path):
            found[path] = None
        if len(found) >= REFUSED_LIMIT:
            break
    return list(found)


def suggest_writable(path: str, home: str) -> str:
    """Return the line for a task file that allows its commands to write a refused path.

    It names a program's whole directory, because the files in it change their names.
    """
    above = path.rpartition("/")[0]
    inner = path[len(home) + 1:].split("/") if is_below(path, home) else [""]
    if inner[0].startswith("."):
        depth = {".config": 2, ".local": 3}.get(inner[0], 1)
        path = "/".join((home, *inner[:depth]))
    elif above and not is_below(home, above):
        path = above
    if is_below(path, home):
        path = "~" + path[len(home):]
    return f"sandbox_write: [{path}]"
