#!/usr/bin/env python3
"""What macOS has for `ps` and `lsof`, as far as the program asks: each by its own name on the PATH.

`ps` takes exactly `-axwwE` and an `-o` for each column. As on a Mac it shows no environment
without -E, nor that of the system's own programs; the comma of a number is the locale's, and so is
the date. Where /proc is empty, SUBAGENT_FLEET_PROC names the directory that has it.
"""
import contextlib
import os
import pathlib
import sys
import time

PROC = pathlib.Path(os.environ.get("SUBAGENT_FLEET_PROC") or "/proc")
COLUMNS = ("pid ppid pgid stat rss pcpu lstart command").split()
SYSTEM = ("/bin/", "/sbin/", "/usr/bin/", "/usr/sbin/", "/usr/libexec/")


def fail(words):
    sys.exit(f"usage: {words}")


def is_of_system(number):
    """Whether a Mac with its usual protection would show no environment of it."""
    try:
        program = os.readlink(PROC / number / "exe")
    except OSError:
        return True
    return program.startswith(SYSTEM)


def row_of(number, shows_environment, booted):
    """The columns of a process."""
    stat = (PROC / number / "stat").read_text("utf-8", "replace")
    before, _, after = stat.rpartition(")")
    fields = after.split()
    command = (PROC / number / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
    if fields[0] == "Z":
        command = f"({before.partition('(')[2]})".encode()
    elif shows_environment and not is_of_system(number):
        environment = (PROC / number / "environ").read_bytes().rstrip(b"\0")
        command += b" " + environment.replace(b"\0", b" ")
    ticks = os.sysconf("SC_CLK_TCK")
    start = booted + int(fields[19]) / ticks
    percent = 100 * (int(fields[11]) + int(fields[12])) / ticks / max(time.time() - start, 0.01)
    is_english = os.environ.get("LC_ALL") == "C"
    number_words = f"{percent:5.1f}"
    return {"pid": number, "ppid": fields[1], "pgid": fields[2],
            "stat": {"Z": "Z"}.get(fields[0], "S+"),
            "rss": str(int(fields[21]) * os.sysconf("SC_PAGE_SIZE") // 1024),
            "pcpu": number_words if is_english else number_words.replace(".", ","),
            "lstart": time.strftime("%a %b %e %H:%M:%S %Y" if is_english else "%d.%m.%Y %H:%M:%S",
                                    time.localtime(start)).ljust(28),
            "command": command.decode("utf-8", "replace")}


def list_processes(words):
    """Print what `ps` prints."""
    if words[:1] != ["-axwwE"] or words[1::2] != ["-o"] * (len(words) // 2):
        fail(f"ps -axwwE -o COLUMN= ..., not {words}")
    columns = []
    for word in words[2::2]:
        column, equals, header = word.partition("=")
        if column not in COLUMNS or not equals or header:
            fail(f"ps: {word}: keyword not found")
        columns.append(column)
    uptime = float((PROC / "uptime").read_text().split()[0])
    booted = time.time() - uptime
    out = []
    for name in numbers():
        try:
            row = row_of(name, "E" in words[0], round(booted))
        except OSError:  # it has ended
            continue
        out.append(" ".join(row[column].rjust(5) for column in columns))
    sys.stdout.buffer.write(("\n".join(out) + "\n").encode("utf-8", "surrogateescape"))


def numbers():
    """The processes, in order."""
    return sorted(filter(str.isdigit, os.listdir(PROC)), key=int)


def has_open(number, is_wanted):
    """Whether a process has a file open that is wanted."""
    with contextlib.suppress(OSError):
        for link in (PROC / number / "fd").iterdir():
            with contextlib.suppress(OSError):
                if is_wanted(link):
                    return True
    return False


def list_openers(path):
    """Yield who has a file open."""
    wanted = os.stat(path)
    for number in numbers():
        if has_open(number, lambda link: os.path.samestat(os.stat(link), wanted)):
            yield number


def list_directories():
    """Yield where each process works: a byte outside ASCII as its number."""
    for number in numbers():
        with contextlib.suppress(OSError):
            path = os.readlink(os.fsencode(PROC / number / "cwd"))
            words = "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in path)
            yield f"p{number}\nfcwd\nn{words}"


def list_open(words):
    """Print what `lsof` prints."""
    if words == ["-w", "-d", "cwd", "-Fn"]:
        lines = list_directories()
    elif words[:2] == ["-t", "--"] and len(words) == 3:
        lines = list_openers(words[2])
    else:
        fail(f"lsof -t -- FILE or -w -d cwd -Fn, not {words}")
    found = [*lines]
    print(*found, sep="\n")
    sys.exit(not found)


if __name__ == "__main__":
    {"ps": list_processes, "lsof": list_open}[pathlib.Path(sys.argv[0]).name](sys.argv[1:])
