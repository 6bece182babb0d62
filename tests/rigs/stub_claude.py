#!/usr/bin/env python3
"""A client that speaks Claude Code's stream-json as recorded from 2.1.327, and does what it is told.

Each line of a prompt that begins with `@` is a step: run, write, ask, wait, say, hang, die, …
`@on MODEL STEP` is for one model alone.
"""
import json
import os
import subprocess
import sys
import time


def emit(kind, **fields):
    print(json.dumps({"type": kind, **fields, "session_id": SESSION}), flush=True)


def value(flag):
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else ""


def result(text="All done, tests pass!", **more):
    emit("result", **{"subtype": "success", "is_error": False, "num_turns": 1, "result": text,
                      "terminal_reason": "completed", "api_error_status": None,
                      "permission_denials": [], **more})


def call(tool, given, text="ok", error=False):
    name = f"toolu_{time.monotonic_ns()}"
    emit("assistant", message={"id": "msg_1", "model": "m", "content": [
        {"type": "tool_use", "id": name, "name": tool, "input": given}],
        "usage": {"input_tokens": 11000}}, parent_tool_use_id=None)
    text = text() if callable(text) else text
    emit("user", message={"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": name, "content": text, "is_error": error}]})


def request(tool, given):
    """Ask the host, and return its answer."""
    emit("control_request", request_id=f"r{time.monotonic_ns()}", request={
        "subtype": "can_use_tool", "tool_name": tool, "input": given, "tool_use_id": "t1"})
    while True:
        line = json.loads(sys.stdin.readline())
        if line["type"] == "control_response":
            return line["response"]["response"]
        take(line)


def take(line):
    """Take what is no answer: an end, or a prompt for later."""
    if line["type"] == "control_request":
        emit("control_response", response={"subtype": "success", "request_id": "e"})
        sys.exit(0)
    LATER.append(line["message"]["content"])


def write(path, text):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(text + "\n")


def act(step, rest):
    """Do one step; say whether the turn goes on."""
    if step == "write":
        path, _, text = rest.partition(" ")
        call("Write", {"file_path": os.path.abspath(path)}, lambda: write(path, text))
    elif step == "run":
        call("Bash", {"command": rest}, lambda: subprocess.run(
            ["sh", "-c", rest], stdin=subprocess.DEVNULL, capture_output=True).stdout.decode())
    elif step == "ask":
        question, *labels = rest.split("|")
        given = {"questions": [{"question": question, "options": [
            {"label": label} for label in labels]}]}
        answer = request("AskUserQuestion", given)
        write("answers.txt", json.dumps(answer["updatedInput"]["answers"]))
    elif step == "both":  # two questions at once
        for number, question in enumerate(rest.split("|")):
            emit("control_request", request_id=f"q{number}", request={
                "subtype": "can_use_tool", "tool_name": "AskUserQuestion",
                "input": {"questions": [{"question": question}]}, "tool_use_id": f"q{number}"})
        for _ in rest.split("|"):
            answer = json.loads(sys.stdin.readline())["response"]["response"]
            write("answers.txt", json.dumps(answer["updatedInput"]["answers"]))
    elif step == "request":  # a question in a form of its own
        answer = request("AskUserQuestion", json.loads(rest))
        write("answers.txt", json.dumps(answer))
    elif step == "edit":
        answer = request("Write", {"file_path": os.path.abspath(rest), "content": "x"})
        write("denied.txt", f"{answer['behavior']} {answer.get('message', '')}")
    elif step == "use":  # a tool by its name, without doing anything
        call(rest, {})
    elif step == "sleep":
        time.sleep(float(rest))
    elif step == "die":
        os.kill(os.getpid(), 9)
    elif step == "hang":
        time.sleep(3600)
    elif step == "ping":
        while True:
            print('{"type":"stream_event","event":{"type":"ping"}}', flush=True)
            time.sleep(0.05)
    elif step == "loop":
        for _ in range(int(rest)):
            call("Bash", {"command": "true"})
    elif step == "error":
        result("API Error", is_error=True, terminal_reason=rest.split()[0],
               api_error_status=int(rest.split()[1]) or None)
        return False
    elif step == "on":  # only with this model
        model, _, rest = rest.partition(" ")
        return value("--model") != model or act(*rest.partition(" ")[::2])
    elif step == "once" and not os.path.exists(".once"):
        write(".once", "")
        return act(*rest.partition(" ")[::2])
    elif step == "quiet":
        result(rest)
        return False
    return True


SESSION, LATER = value("--session-id") or value("--resume"), []
STATE = os.path.join(os.environ["STUB_HOME"], SESSION) if "STUB_HOME" in os.environ else ""
if STATE and value("--session-id") and os.path.exists(STATE):
    sys.exit(f"Error: Session ID {SESSION} is already in use.")
if STATE and value("--resume") and not os.path.exists(STATE):
    result(subtype="error_during_execution", is_error=True, num_turns=0)
    sys.exit("No conversation found with session ID")
for raw in sys.stdin:
    prompts = [json.loads(raw)]
    if prompts[0]["type"] != "user":
        take(prompts[0])
    LATER.insert(0, prompts[0]["message"]["content"])
    while LATER:
        text = LATER.pop(0)
        emit("system", subtype="init", tools=["Bash", "AskUserQuestion"], model=value("--model"))
        told = text
        answered = text.startswith("The answer to your question is:") and "\n@" not in text
        if ("was ended from outside" in text or answered) and os.path.exists(f"{STATE}.last"):
            with open(f"{STATE}.last", encoding="utf-8") as stream:  # it goes on, as a model would
                text = stream.read()
            if answered:
                text = "\n".join(line for line in text.split("\n") if line[:4] != "@ask")
        if STATE:
            if "\n@" in f"\n{text}":  # whole, and before the session exists: it may be killed here
                with open(f"{STATE}.new", "w", encoding="utf-8") as stream:
                    stream.write(text)
                os.replace(f"{STATE}.new", f"{STATE}.last")
            write(STATE, told)
        steps = [line[1:].partition(" ")[::2] for line in text.split("\n") if line[:1] == "@"]
        if all(act(step, rest) for step, rest in steps):
            result()
