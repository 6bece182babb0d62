"""Every sentence of subagent_fleet.py that a person may see, once, with its first line.

python3 tests/rigs/sentences.py [WORDS]    those that hold these words, else all; the count goes to stderr

Read from the syntax tree: what errors, findings, cells, flags, commands, pages and generated files
say. Docstrings and comments are the reader's of the file; a text that is no sentence (a pattern, a
style, a script, a name) is left out.
"""
import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILE = ROOT / "subagent_fleet.py"
# Texts for programs and models, by the name that holds them: browsers, shells, trials, agents.
FOR_PROGRAMS = re.compile(r"_PAGE_\w+|_?\w*(CSS|SCRIPT|SHELL|COMPLETION|LAUNCHER|STARTER|PATTERN)\w*|FILLER"
                          r"|DEMO_\w+|\w+_TRIALS?|.*PNG|DOOR_PAGE|EXAMPLES|COMPLETIONS")


def read_sentences(path=FILE):
    """Return {sentence: the first line on which it stands}."""
    sentences = {}
    for line, text in sorted(_texts(ast.parse(path.read_text(encoding="utf-8")))):
        for part in re.split(r"\n{2,}|\n(?=[-|#] ?)", text) if "\n\n" in text else [text]:
            sentence = " ".join(part.split())
            if _is_sentence(sentence):
                sentences.setdefault(sentence, line)
    return sentences


def _texts(node, inside=False):
    """Yield (line, text) of each whole text: joined ones as one, with `{}` where values come."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(name, ast.Name) and FOR_PROGRAMS.fullmatch(name.id) for name in targets):
            return
    if isinstance(node, ast.Call) and _name_of(node.func) in ("LatePattern", "compile", "fullmatch",
                                                              "match", "search", "sub", "split"):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    text = _whole(node)
    if text is not None:
        yield node.lineno, text
        return
    for child in ast.iter_child_nodes(node):
        yield from _texts(child)


def _whole(node):
    """Return the text that a node is, None where it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _whole(node.left), _whole(node.right)
        if left is not None or right is not None:
            return ("{}" if left is None else left) + ("{}" if right is None else right)
    return None


def _name_of(function):
    return getattr(function, "attr", getattr(function, "id", ""))


def _is_sentence(text):
    """Tell a sentence from a name, a path, a pattern or a piece of a program."""
    if re.search(r"[\\^]\w|\(\?|;$|\{\{|=>|</?\w+[ >]|function |const |\) \{", text):
        return False
    return len(re.findall(r"(?<![\w/.<-])[A-Za-z][a-z']*(?![\w/=<])", text)) >= 3


if __name__ == "__main__":
    wanted = " ".join(sys.argv[1:])
    shown = {text: line for text, line in read_sentences().items() if wanted in text}
    for text, line in sorted(shown.items(), key=lambda item: item[1]):
        print(f"{line}: {text}")
    print(f"{len(shown)} sentences", file=sys.stderr)
