#!/usr/bin/env python3
"""Join the parts of src/fleet into subagent_fleet.py, the one file that people have.

    python3 src/build.py               write subagent_fleet.py, if it is not the build
    python3 src/build.py --check       write nothing; exit 1 if subagent_fleet.py is not the build
    python3 src/build.py where LINE…   say which part, and which line of it, a line comes from
    python3 src/build.py take          carry edits of subagent_fleet.py back into their parts

It copies text and never formats it: below its imports a part stands in the file as it is. Its
docstring becomes the comment above it, `asset("…")` the text of that file, and the modules that
the parts import stand once, at the top. The order is that of src/fleet/CONTENTS. Nothing in the
file is made of the whole (no date, no count, no hash), so that git merges two branches' files
into the build of their merged parts. What a part may say: src/README.md; each rule that is
broken is told with file and line.
"""
from __future__ import annotations

import ast
import builtins
import difflib
import pathlib
import re
import symtable
import sys

SRC = pathlib.Path(__file__).resolve().parent
FLEET = SRC / "fleet"
ASSETS = FLEET / "assets"
FILE = SRC.parent / "subagent_fleet.py"
GATE = "start/gate.py"  # the head of the file: it stands there from its first line
ORIGIN = "# Built from src/fleet by src/build.py (github.com/adityak74/subagent-fleet): edit that."
LINES_LIMIT = 600
WIDTH = 79
# What a pure room may not import: it would touch more than its arguments.
EFFECTS = {"os", "time", "random", "secrets", "socket", "select", "signal", "ssl", "subprocess",
           "urllib", "shutil", "tempfile", "threading", "queue", "_thread", "glob", "resource"}
ODD_NAMES = {"__name__", "__file__", "globals"}
MAY_BE_ODD = {"start", "program"}  # the rooms that may ask how the file is run
CALL = re.compile(r'^(\w+) = asset\("([^"]+)"\)$')


class Problem(Exception):
    """Something in the sources that cannot be built: where, and what."""


class Part:
    """One file of the house."""

    def __init__(self, room: str, path: str, rank: int) -> None:
        self.room, self.path, self.rank = room, path, rank
        self.source = (FLEET / path).read_text(encoding="utf-8")
        self.lines = self.source.split("\n")
        self.tree = ast.parse(self.source, path)
        self.modules: dict[str, int] = {}  # of the standard library, and the line
        self.typing: list[str] = []  # lines of imports that only checkers read
        self.types: dict[str, str] = {}  # name: definition that only checkers read
        self.taken: dict[str, tuple[str, int, bool]] = {}  # name: part, line, only for checkers
        self.doc = ast.get_docstring(self.tree) or ""
        self.names = {name: node.lineno for node in self.tree.body for name in names_of(node)}
        self.first = 1  # the line where its text begins, below the imports
        self.problems: list[str] = []
        if path == GATE:
            self._read_gate()
        else:
            self._read_head()
        self.assets = {number: match[2] for number, line in enumerate(self.lines, 1)
                       for match in [CALL.match(line)] if match}

    def fail(self, line: int, what: str) -> None:
        """Note what is wrong in a line."""
        self.problems.append(f"src/fleet/{self.path}:{line}: {what}")

    def _read_head(self) -> None:
        """Read the docstring and the imports; what follows is the text of the part."""
        end = 0
        for node in self.tree.body:
            block = block_for_checkers(node)
            if block:
                self._read_typing(block)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                self._read_import(node, False)
            elif not (isinstance(node, ast.Expr) and end == 0):  # the docstring
                break
            end = node.end_lineno or 0
        while end < len(self.lines) and not self.lines[end].strip():
            end += 1
        self.first = end + 1
        # Most parts say neither word again: to walk all trees takes half of the builder's time.
        below = "\n".join(self.lines[end:])
        if "from fleet" in below or "TYPE_CHECKING" in below:
            self._find_late_imports()

    def _find_late_imports(self) -> None:
        """Note what is imported below the imports."""
        for each in ast.walk(self.tree):
            line = getattr(each, "lineno", 0)
            if line < self.first:
                continue
            if isinstance(each, ast.ImportFrom) and str(each.module).startswith("fleet"):
                self.fail(line, "a part is imported at the top, never below")
            elif block_for_checkers(each):
                self.fail(line, "one `if TYPE_CHECKING:`, at the top")

    def _read_gate(self) -> None:
        """Read the imports of the head of the file, which stays as it is."""
        for node in self.tree.body:
            block = block_for_checkers(node)
            if block:
                self._read_typing(block)
                self.checkers = block
                self.names.update((name, each.lineno) for each in block.orelse
                                  for name in names_of(each))

    def _read_import(self, node: ast.stmt, for_checkers: bool) -> None:
        """Read one import."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname or "." in alias.name:
                    self.fail(node.lineno, "`import x`: a whole module, under its own name")
                self.modules[alias.name] = node.lineno
            return
        assert isinstance(node, ast.ImportFrom)
        module, names = str(node.module), [alias.name for alias in node.names]
        if node.level or "*" in names or any(alias.asname for alias in node.names):
            self.fail(node.lineno, "`from fleet.room.part import name`: no `.`, no `*`, no `as`")
        elif module.startswith("fleet."):
            path = module[len("fleet."):].replace(".", "/") + ".py"
            for name in names:
                self.taken[name] = path, node.lineno, for_checkers
        elif for_checkers:
            self.typing += [f"from {module} import {name}" for name in names]
        elif (module, names) != ("typing", ["TYPE_CHECKING"]) and module != "__future__":
            self.fail(node.lineno, f"`import {module}`, whole: then it is loaded when it is used")

    def _read_typing(self, block: ast.If) -> None:
        """Read what only checkers read."""
        modules = dict(self.modules)
        for node in block.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._read_import(node, True)
                continue
            text = "\n".join(line[4:] for line in self.lines[node.lineno - 1:node.end_lineno])
            self.types.update((name, text) for name in names_of(node))
        self.typing += [f"import {name}" for name in self.modules if name not in modules]
        self.modules = modules


def names_of(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return [each.id for target in targets for each in ast.walk(target)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]


def block_for_checkers(node: ast.AST) -> ast.If | None:
    """Return an `if TYPE_CHECKING:`, if it is one."""
    is_block = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    return node if is_block else None  # type: ignore[return-value]


class Room:
    """A folder: a line of CONTENTS, and the parts below it."""

    def __init__(self, name: str, what: str) -> None:
        self.name, self.what, self.parts = name, what, list[Part]()

    @property
    def is_pure(self) -> bool:
        return self.what.endswith("(pure)")


def read_house() -> list[Room]:
    """Return the rooms with their parts, as CONTENTS orders them."""
    rooms: list[Room] = []
    rank = 0
    for number, line in enumerate((FLEET / "CONTENTS").read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if not line.startswith(" "):
            name, _, what = line.partition(" ")
            rooms.append(Room(name.rstrip("/"), what.strip()))
            continue
        path = f"{rooms[-1].name}/{line.strip()}"
        if not (FLEET / path).is_file():
            raise Problem(f"src/fleet/CONTENTS:{number}: there is no src/fleet/{path}")
        try:
            rooms[-1].parts.append(Part(rooms[-1].name, path, rank))
        except SyntaxError as error:
            raise Problem(f"src/fleet/{path}:{error.lineno}: {error.msg}") from error
        rank += 1
    return rooms


def find_problems(rooms: list[Room]) -> list[str]:
    """Return each rule of the house that a part breaks, with its place."""
    parts = {part.path: part for room in rooms for part in room.parts}
    pure = {room.name for room in rooms if room.is_pure}
    found: list[str] = []
    homes: dict[str, Part] = {}
    modules = {name for part in parts.values() for name in part.modules}
    for part in parts.values():
        for name, line in part.names.items():
            if name in homes:
                part.fail(line, f"`{name}` stands in src/fleet/{homes[name].path}, too")
            elif name in modules or hasattr(builtins, name) and not name.startswith("__"):
                part.fail(line, f"`{name}` is a module's or a builtin's name")
            homes[name] = part
    for part in parts.values():
        check_part(part, parts, homes, pure)
        found += part.problems
    for path in sorted(FLEET.rglob("*")):
        name = path.relative_to(FLEET).as_posix()
        if path.suffix == ".py" and name not in parts:
            found.append(f"src/fleet/{name}:1: it is not in CONTENTS")
    used = {name for part in parts.values() for name in part.assets.values()}
    kept = {path.relative_to(ASSETS).as_posix() for path in ASSETS.rglob("*") if path.is_file()}
    found += [f"src/fleet/assets/{name}: no part has `asset(\"{name}\")`"
              for name in sorted(kept - used)]
    return found + [f"src/fleet/assets/{name}: it is not there" for name in sorted(used - kept)]


def check_part(part: Part, parts: dict[str, Part], homes: dict[str, Part], pure: set[str]) -> None:
    """Note what a part may not say, be or take."""
    if not part.doc:
        part.fail(1, "its docstring says what it holds")
    if len(part.lines) > LINES_LIMIT + 1:
        part.fail(LINES_LIMIT, f"{len(part.lines) - 1} lines; {LINES_LIMIT} at most")
    check_taken(part, parts)
    if part.room in pure:
        for name in sorted(EFFECTS & set(part.modules)):
            part.fail(part.modules[name], f"{part.room}/ is pure: no `import {name}`")
    if part.path != GATE:
        check_names(part, homes, {name for each in parts.values() for name in each.modules})


def check_taken(part: Part, parts: dict[str, Part]) -> None:
    """Note what a part may not take of others."""
    for name, (path, line, for_checkers) in part.taken.items():
        other = parts.get(path)
        known = other and {*other.names, *other.types, *(["asset"] if path == GATE else ())}
        if other is None or name not in (known or ()):
            part.fail(line, f"src/fleet/{path} has no `{name}`")
        elif other.rank >= part.rank and not for_checkers:
            part.fail(line, f"src/fleet/{path} stands below this part in CONTENTS")
        elif re.match(r"_[^_]", name):
            part.fail(line, f"`{name}` is private in src/fleet/{path}")


def check_names(part: Part, homes: dict[str, Part], modules: set[str]) -> None:
    """Note names that are used without an import, and what only a few parts may say."""
    known_here = {*part.names, *part.taken, *part.modules, *part.types, "TYPE_CHECKING"}
    # Python 3.9 counts what annotations say, too.
    known_here |= {line.rpartition(" ")[2] for line in part.typing}
    for name in sorted(global_names(part)):
        if name in ODD_NAMES and part.room not in MAY_BE_ODD:
            part.fail(line_of(part, name), f"`{name}` is said in {' and '.join(MAY_BE_ODD)} alone")
        elif name in modules and name not in known_here:
            part.fail(line_of(part, name), f"`{name}` is not imported: import {name}")
        elif name in homes and name not in known_here:
            module = homes[name].path[:-len(".py")].replace("/", ".")
            part.fail(line_of(part, name), f"`{name}` is not imported: "
                                           f"from fleet.{module} import {name}")
    for node in ast.walk(part.tree) if "global" in part.source else ():
        if isinstance(node, ast.Global):
            part.fail(node.lineno, "no `global`: let a value be returned, or an object hold it")


def global_names(part: Part) -> set[str]:
    """Return the names that the code of a part looks up outside of its functions."""
    found: set[str] = set()
    waiting = [symtable.symtable(part.source, part.path, "exec")]
    while waiting:
        scope = waiting.pop()
        is_top = scope.get_type() == "module"
        found.update(symbol.get_name() for symbol in scope.get_symbols()
                     if symbol.is_referenced() and (is_top or symbol.is_global()))
        waiting += scope.get_children()
    return found


def line_of(part: Part, name: str) -> int:
    """Return the first line that says a name."""
    return next((node.lineno for node in ast.walk(part.tree)
                 if isinstance(node, ast.Name) and node.id == name), 1)


class Built:
    """The lines of the file; of each, where it comes from: path, line, and the text there."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.origins: list[tuple[str, int, str] | None] = []

    def add(self, text: str) -> None:
        """Add lines that stand in no part."""
        lines = text.split("\n")
        self.lines += lines
        self.origins += [None] * len(lines)

    def copy(self, path: str, number: int, source: str, line: str | None = None) -> None:
        """Add a line of a source, as it is or as `line`."""
        self.lines.append(source if line is None else line)
        self.origins.append((path, number, source))

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def build(rooms: list[Room]) -> Built:
    """Join the parts."""
    built = Built()
    for room in rooms:
        parts = [part for part in room.parts if part.path != GATE]
        if len(parts) < len(room.parts):
            add_gate(built, room.parts[0], rooms)
        edge = "# " + "=" * (WIDTH - 2)
        what = f"{room.name}/  {room.what}"
        built.add(f"\n\n{edge}\n# {what}\n{edge}")
        for part in parts:
            banner = f"# == {part.path}, from line {part.first} "
            built.add("\n\n" + banner.ljust(WIDTH, "=") + "\n#")
            add_doc(built, part)
            built.add("")
            add_lines(built, part, part.first)
    return built


def add_doc(built: Built, part: Part) -> None:
    """Add the docstring of a part as a comment."""
    node = part.tree.body[0]
    for number in range(node.lineno, (node.end_lineno or 0) + 1):
        source = part.lines[number - 1]
        text = source.replace('"""', "").rstrip()
        if text or number < (node.end_lineno or 0):
            built.copy(f"src/fleet/{part.path}", number, source, f"# {text}".rstrip())


def add_lines(built: Built, part: Part, first: int, last: int = 0) -> None:
    """Add lines of a part as they are, with the texts that it takes from assets."""
    lines = part.lines
    end = last or len(lines)
    while end >= first and not lines[end - 1].strip():
        end -= 1
    for number in range(first, end + 1):
        if number in part.assets:
            add_asset(built, part.assets[number], lines[number - 1].partition(" ")[0])
        else:
            built.copy(f"src/fleet/{part.path}", number, lines[number - 1])


def add_asset(built: Built, name: str, variable: str) -> None:
    """Add a text as a raw string, to the letter."""
    path = f"src/fleet/assets/{name}"
    text = (ASSETS / name).read_text(encoding="utf-8")
    if '"""' in text or "\r" in text or not text.endswith("\n") or text.endswith("\\\n"):
        raise Problem(f"{path}: a raw string cannot hold it (three quotes, a carriage return, "
                      "no line end at its end)")
    lines = text[:-1].split("\n")
    built.copy(path, 1, lines[0], f'{variable} = r"""{lines[0]}')
    for number, line in enumerate(lines[1:], 2):
        built.copy(path, number, line)
    built.add('"""')


def add_gate(built: Built, gate: Part, rooms: list[Room]) -> None:
    """Add the head of the file: it names the rooms, and the modules that parts import."""
    block = gate.checkers
    first_else = block.orelse[0]
    path = f"src/fleet/{gate.path}"
    for number, line in enumerate(gate.lines[:block.lineno - 1], 1):
        if line.strip() == "@rooms":
            built.add("\n".join(f"  {room.name:10} {room.what}" for room in rooms))
            continue
        built.copy(path, number, line)
        if number == 1:
            built.add(ORIGIN)
    eager = {alias.name for node in gate.tree.body if isinstance(node, ast.Import)
             for alias in node.names}
    parts = [part for room in rooms for part in room.parts]
    late = sorted({name for part in parts for name in part.modules} - eager)
    built.copy(path, block.lineno, gate.lines[block.lineno - 1])
    for text in [*sorted({f"import {name}" for name in late}
                         | {line for part in parts for line in part.typing}, key=by_module),
                 "", *types_of(parts)]:
        built.add("\n".join(f"    {line}".rstrip() for line in text.split("\n")))
    built.add("else:")
    for number in range(first_else.lineno, (block.end_lineno or 0) + 1):
        built.copy(path, number, gate.lines[number - 1])
    built.add("")
    for name in late:
        built.add(f'    {name} = _Late("{name}")')
    add_lines(built, gate, (block.end_lineno or 0) + 1)


def by_module(line: str) -> tuple[bool, str]:
    """Put `import` above `from`."""
    return line.startswith("from"), line


def types_of(parts: list[Part]) -> list[str]:
    """Return the definitions that only checkers read, each once."""
    texts: dict[str, tuple[str, str]] = {}
    for part in parts:
        for name, text in part.types.items():
            if name == "asset":
                continue
            if texts.setdefault(name, (text, part.path))[0] != text:
                raise Problem(f"src/fleet/{part.path}:1: `{name}` is another one in "
                              f"src/fleet/{texts[name][1]}")
    return list(dict.fromkeys(text for text, _ in texts.values()))


def where(built: Built, words: list[str]) -> list[str]:
    """Return where lines come from."""
    found = []
    for word in words:
        if not word.isdigit() or not 0 < int(word) <= len(built.lines):
            raise Problem(f"`{word}` is no line of {FILE.name}, which has {len(built.lines)}")
        origin = built.origins[int(word) - 1]
        found.append("{}:{}".format(*origin) if origin else "src/build.py:1")
    return found


def take(built: Built, actual: list[str]) -> list[str]:
    """Carry what is edited in the file back to where it comes from; return those places."""
    edits: dict[str, list[tuple[int, int, list[str]]]] = {}
    matcher = difflib.SequenceMatcher(None, built.lines, actual)
    for kind, low, high, new_low, new_high in matcher.get_opcodes():
        if kind == "equal":
            continue
        path, first, last, lines = plan_edit(built, (low, high), actual[new_low:new_high])
        edits.setdefault(path, []).append((first, last, lines))
    for path, changes in edits.items():
        file = SRC.parent / path
        lines = file.read_text(encoding="utf-8").split("\n")
        for first, last, new in reversed(changes):
            lines[first - 1:last] = new
        file.write_bytes("\n".join(lines).encode("utf-8"))
    return [f"{path}:{first}" for path, changes in edits.items() for first, _, _ in changes]


def plan_edit(built: Built, span: tuple[int, int], new: list[str]
              ) -> tuple[str, int, int, list[str]]:
    """Return the file, the lines there, and what comes in their place.

    What is new between two lines follows the upper one, if that stands in a part.
    """
    low, high = span
    old = [origin for origin in built.origins[low:high] if origin]
    made = [line for line, origin in zip(built.lines[low:high], built.origins[low:high])
            if origin is None and line.strip()]
    above = built.origins[low - 1] if low else None
    below = built.origins[high] if high < len(built.origins) else None
    near = old[0] if old else above or below
    if made or near is None or len({path for path, _, _ in old}) > 1:
        raise Problem(f"{FILE.name}:{low + 1}: this line is made by src/build.py, or the edit "
                      "spans two parts; make it in src/fleet")
    path = near[0]
    if not old:
        first = near[1] + 1 if above else near[1]
        return path, first, first - 1, new
    if all(built.lines[low + index] == origin[2] for index, origin in enumerate(old)):
        return path, old[0][1], old[-1][1], new
    if len(old) == len(new) == high - low:  # the comment above a part is its docstring
        texts = [origin[2].replace(line_text(built.lines[low + index]), line_text(new[index]))
                 for index, origin in enumerate(old)]
        return path, old[0][1], old[-1][1], texts
    raise Problem(f"{FILE.name}:{low + 1}: this is a docstring or the first line of a text; "
                  f"edit {path}:{old[0][1]}")


def line_text(line: str) -> str:
    """Return what a line says behind the `#` of a comment or the quotes of a text."""
    return re.sub(r'^# |^\w+ = r"""', "", line)


def main(words: list[str]) -> int:
    """Do what is asked."""
    command = words[0] if words else ""
    if command not in ("", "--check", "where", "take") or len(words) > 1 and command != "where":
        print(__doc__)
        return 2
    rooms = read_house()
    built = build(rooms)
    actual = FILE.read_text(encoding="utf-8") if FILE.is_file() else ""
    if command == "where":
        print("\n".join(where(built, words[1:])))
        return 0
    if command == "take":
        places = take(built, actual.split("\n")[:-1])
        print("\n".join(f"taken into {place}" for place in places) or "nothing to take")
        rooms = read_house()
        built = build(rooms)

    problems = find_problems(rooms)
    if problems:
        raise Problem("\n".join(problems))
    if built.text() == actual:
        return 0
    if command == "--check":
        raise Problem(f"{FILE.name} is not the build of src/: python3 src/build.py")
    FILE.write_bytes(built.text().encode("utf-8"))
    FILE.chmod(0o755)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Problem as problem:
        sys.exit(f"error: {problem}")
