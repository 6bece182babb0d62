"""macOS's sandbox-exec, as far as the program asks: what its profile says is done by bubblewrap.

It takes `-p PROFILE -D NAME=VALUE… -- PROGRAM…`. Like the real one it becomes the program, and
shows it the whole disk, /tmp as well.
"""
import os
import re
import sys

PROFILE = r"""\(version 1\)
\(allow default\)
\(deny file-write\*\)
(\(allow file-write\* [^\n]*/dev/[^\n]*\)
)((?:\((?:allow|deny) file-write\* \(subpath \(param "P\d+"\)\)\)
)*)"""


def main(words):
    assert words[0] == "-p"
    profile = re.fullmatch(PROFILE, words[1])
    assert profile, words[1]
    assert words[1].count("(") == words[1].count(")")
    values, at = {}, 2
    while words[at] == "-D":
        name, _, value = words[at + 1].partition("=")
        values[name], at = value, at + 2
    assert words[at] == "--"
    argv = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev"]
    for verb, name in re.findall(r'\((allow|deny) file-write\* \(subpath \(param "(P\d+)"\)\)\)', profile[2]):
        assert values[name] == os.path.realpath(values[name]), "sandbox-exec knows no links"
        argv += [{"allow": "--bind-try", "deny": "--ro-bind-try"}[verb], values[name], values[name]]
    os.execvp("bwrap", [*argv, "--", *words[at + 1:]])


main(sys.argv[1:])
