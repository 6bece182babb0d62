"""How long `trace` takes over 500 MB of transcripts, and how much memory: 10 s and 150 MB at most.

One session of a main agent and forty subagents, in the proportions of real ones: of each request
an answer (1.5 kB, every fifth with a file of 20 kB in it), a tool's result (2 to 60 kB) and what
Claude Code adds. Then a directory of as many bytes in 400 sessions, which is only listed.
"""
import itertools
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "subagent_fleet.py"
MEGABYTES = int(os.environ.get("MEGABYTES", "500"))
SECONDS_GOAL, MEMORY_GOAL = 10, 150
FLEET = {"project": {"name": "bench"}, "nodes": {"a": {"endpoint": "http://localhost:11434"}},
         "models": {"m": {"node": "a", "ollama_model": "m:7b", "litellm_alias": "local"}},
         "agents": {"worker": {"model": "m", "description": "d"}}}
SESSION = "00000000-0000-4000-8000-%012d"


def lines_of(rng, agent, count):
    """The lines of a transcript in which `count` requests were made, about 20 kB each."""
    text = "".join(rng.choice("abcdefgh \n\"\\é{}") for _ in range(60_000))
    stamp = "2026-11-18T06:37:54.354Z"
    for number in range(count):
        request = f"req_{rng.getrandbits(96):024x}"
        content = [{"type": "tool_use", "id": f"call{number}", "name": "Write", "input": {
            "file_path": "/x", "content": text[:20_000 if number % 5 == 0 else 300]}}]
        last = number == count - 1
        yield {"type": "assistant", "isSidechain": bool(agent), "requestId": request,
               "timestamp": stamp, "requestedModel": "local", "version": "2.1.326", "message": {
                   "id": f"msg_{number}", "role": "assistant", "model": "local",
                   "content": [{"type": "text", "text": "Done."}] if last else content,
                   "stop_reason": "end_turn" if last else "tool_use",
                   "usage": {"input_tokens": 9000, "cache_read_input_tokens": 0,
                             "output_tokens": 40, "service_tier": "standard"}},
               "uuid": f"{number:032x}", "cwd": "/x", "sessionId": "s", "gitBranch": "main"}
        result = text[:rng.randrange(2_000, 25_000)]
        yield {"type": "user", "isSidechain": bool(agent), "timestamp": stamp, "message": {
            "role": "user", "content": [{"tool_use_id": f"call{number}", "type": "tool_result",
                                         "content": result}]}}
        yield {"type": "attachment", "attachment": {"type": "prompt_snapshot",
                                                    "systemPrompt": text[:1500]}}


def write_transcript(path, rng, agent, size):
    """Write lines until there are so many bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first = {"type": "user", "message": {"role": "user", "content": "Do it."},
             "timestamp": "2026-11-18T06:37:50.000Z", "version": "2.1.326"}
    block = [json.dumps(line, separators=(",", ":"), ensure_ascii=False).encode()
             for line in lines_of(rng, agent, 200)]
    with open(path, "wb") as stream:
        stream.write(json.dumps(first).encode() + b"\n")
        for line in itertools.cycle(block):
            if stream.tell() >= size:
                return
            line = re.sub(rb"req_[0-9a-f]{24}", b"req_%024x" % rng.getrandbits(96), line)
            stream.write(line + b"\n")


def measure(words, project, home):
    """Seconds, megabytes at the most, and what was printed."""
    # The peak of the process that starts it counts too, so that one is as small as can be.
    program = ("import os, resource, sys; "
               "os.waitpid(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ), 0); "
               "print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, sys.executable, "-I", "-S", str(SCRIPT),
         "trace", *words], cwd=project, env={**os.environ, "HOME": str(home)}, check=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8")
    seconds = time.perf_counter() - began
    peak = int(done.stdout.split()[-1]) / (1048576 if sys.platform == "darwin" else 1024)
    return seconds, peak, done.stdout


def main():
    """Measure and print."""
    rng = random.Random(5)
    with tempfile.TemporaryDirectory() as place:
        project, home = pathlib.Path(place, "project"), pathlib.Path(place, "home")
        project.mkdir()
        (project / "fleet.yaml").write_text(json.dumps(FLEET), encoding="utf-8")
        name = re.sub("[^A-Za-z0-9]", "-", os.path.realpath(project))
        sessions = home / ".claude" / "projects" / name
        half = MEGABYTES * 500_000
        write_transcript(sessions / f"{SESSION % 0}.jsonl", rng, "", half)
        for number in range(40):
            path = sessions / (SESSION % 0) / "subagents" / f"agent-a{number}.jsonl"
            write_transcript(path, rng, f"a{number}", half // 40)
        size = sum(path.stat().st_size for path in sessions.rglob("*.jsonl")) / 1e6
        for words in (["last"], ["last", "--audit"]):
            seconds, peak, text = measure(words, project, home)
            requests = re.search(r"([\d,]+) requests", text)[1]
            print(f"trace {' '.join(words)}: {size:.0f} MB, {requests} requests: {seconds:.1f} s "
                  f"(goal {SECONDS_GOAL}), {peak:.0f} MB (goal {MEMORY_GOAL})")

        (sessions / f"{SESSION % 0}.jsonl").unlink()
        for number in range(1, 400):
            write_transcript(sessions / f"{SESSION % number}.jsonl", rng, "", half // 400)
        seconds, peak, text = measure([], project, home)
        print(f"trace, {len(text.splitlines())} lines of 400 sessions: {seconds:.1f} s, "
              f"{peak:.0f} MB")


if __name__ == "__main__":
    main()
