"""Run the program as Windows would, as far as another system can: `python as_windows.py WORDS…`.

What Windows lacks is taken away: modules, calls on descriptors of directories, forks, signals,
poll. Paths stay this system's, for that is what its disk has; text goes out with Windows' newlines.
"""
import asyncio  # noqa: F401 - this and the like: what asks for the system when imported has asked
import ctypes  # noqa: F401
import http.server  # noqa: F401
import os
import pathlib  # noqa: F401
import platform  # noqa: F401
import select
import shutil
import signal
import subprocess
import sys
import tempfile  # noqa: F401
import urllib.request  # noqa: F401

MODULES = ("fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "syslog")
CALLS = ("chown chroot fchmod fchown fork forkpty getegid geteuid getgid getgroups getloadavg getpgid "
         "getpgrp getresuid getuid initgroups killpg lchown mkfifo mknod nice openpty pread pwrite "
         "posix_spawn sched_getaffinity sendfile setegid seteuid setgid setpgid setsid setuid "
         "sysconf sync tcgetpgrp tcsetpgrp uname wait wait3 wait4 WNOHANG O_CLOEXEC O_DIRECTORY "
         "O_DSYNC O_NOCTTY O_NOFOLLOW O_NONBLOCK O_PATH O_SYNC").split()
SIGNALS = ("SIGALRM SIGCHLD SIGCONT SIGHUP SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGTTIN SIGTTOU "
           "SIGUSR1 SIGUSR2 SIGWINCH alarm pthread_kill pthread_sigmask setitimer siginterrupt").split()


def refuse_directories(call):
    """Take descriptors of directories from a call, as Windows has none."""
    def without(*words, **more):
        for name in ("dir_fd", "src_dir_fd", "dst_dir_fd"):
            if more.get(name) is not None:
                raise NotImplementedError(f"{name} unavailable on this platform")
        return call(*words, **more)
    return without


def refuse_posix(popen):
    class Popen(popen):
        def __init__(self, *words, **more):
            unknown = {"preexec_fn", "pass_fds", "start_new_session", "process_group"} & set(more)
            if any(more[name] for name in unknown):
                raise ValueError(f"{sorted(unknown)} are not supported on Windows platforms")
            super().__init__(*words, **more)
    return Popen


def become_windows():
    for name in MODULES:
        sys.modules[name] = None
    for name in CALLS:
        if hasattr(os, name):
            delattr(os, name)
    for name in SIGNALS:
        if hasattr(signal, name):
            delattr(signal, name)
    for name in ("poll", "epoll", "kqueue"):
        if hasattr(select, name):
            delattr(select, name)
    for name in ("open", "stat", "mkdir", "readlink", "unlink", "rmdir", "replace", "rename", "link"):
        setattr(os, name, refuse_directories(getattr(os, name)))
    shutil._use_fd_functions = subprocess._USE_POSIX_SPAWN = False  # decided when imported
    if hasattr(shutil, "_win_path_needs_curdir"):  # 3.12 and newer ask Windows itself
        shutil._win_path_needs_curdir = lambda *_: False
    subprocess.Popen = refuse_posix(subprocess.Popen)
    os.name, sys.platform = "nt", "win32"
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(newline="\r\n")


if __name__ == "__main__":
    program = sys.argv.pop(1)
    sys.argv[0] = program
    with open(program, encoding="utf-8") as stream:
        code = compile(stream.read(), program, "exec")
    become_windows()
    exec(code, {"__name__": "__main__", "__file__": program})
