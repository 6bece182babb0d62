"""Every client's dialect and every node's wire, so that tests can run over all pairs.

A play is a list of steps that a node says: ("thinking", words), ("text", words), ("call", name,
arguments), ("end", reason, tokens in, tokens out) and ("stop", sequence, in, out). Arguments that
are text are sent as they are, though they be no JSON, where the wire can. A conversation
is a list of ("user", words), ("image", base64), ("call", id, name, arguments), ("result", id, words).
A new backend is a row of BACKENDS, a new dialect one of CLIENTS; the suite does the rest.
"""
import json
from collections import namedtuple

Answer = namedtuple("Answer", "status text thinking calls reason tokens error pings")
TOOL = {"name": "Bash", "description": "run", "schema": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}
PIXEL = ("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
         "gg==")


# -- what nodes say --

def dumps(value):
    return json.dumps(value, ensure_ascii=False)


def ollama_lines(steps):
    for kind, *step in steps:
        if kind in ("thinking", "text"):
            message = {"content" if kind == "text" else kind: step[0]}
        elif kind == "call":
            message = {"content": "", "tool_calls": [
                {"function": {"name": step[0], "arguments": step[1]}}]}
        else:
            done = "length" if step[0] == "max_tokens" else "stop"
            if kind == "stop":  # it is not told of them
                yield dumps({"message": {"content": f"{step[0]} never shown"}, "done": False})
            yield dumps({"message": {"content": ""}, "done": True, "done_reason": done,
                         "prompt_eval_count": step[1], "eval_count": step[2]})
            return
        yield dumps({"message": message, "done": False})


def event_lines(event):
    return [f"event: {event['type']}", f"data: {dumps(event)}", ""]


def messages_lines(steps):
    yield ": a comment"
    tokens_in = next((step[2] for step in steps if step[0] in ("end", "stop")), 7)
    usage = {"input_tokens": tokens_in, "output_tokens": 0}
    yield from event_lines({"type": "message_start", "message": {"usage": usage}})
    yield from event_lines({"type": "ping"})
    index, is_open = -1, ""
    for kind, *step in steps:
        if is_open and kind != is_open:
            yield from event_lines({"type": "content_block_stop", "index": index})
            is_open = ""
        if kind in ("thinking", "text"):
            if not is_open:
                index, is_open = index + 1, kind
                yield from event_lines({"type": "content_block_start", "index": index,
                                        "content_block": {"type": kind, kind: ""}})
            yield from event_lines({"type": "content_block_delta", "index": index,
                                    "delta": {"type": f"{kind}_delta", kind: step[0]}})
        elif kind == "call":
            index += 1
            yield from event_lines({"type": "content_block_start", "index": index, "content_block": {
                "type": "tool_use", "id": f"toolu_{index}", "name": step[0], "input": {}}})
            text = json.dumps(step[1])
            for piece in (text[:5], text[5:]):
                yield from event_lines({"type": "content_block_delta", "index": index, "delta": {
                    "type": "input_json_delta", "partial_json": piece}})
            yield from event_lines({"type": "content_block_stop", "index": index})
        else:
            reason, stop = (step[0], None) if kind == "end" else ("stop_sequence", step[0])
            yield from event_lines({"type": "message_delta", "usage": {"output_tokens": step[2]},
                                    "delta": {"stop_reason": reason, "stop_sequence": stop}})
            yield from event_lines({"type": "message_stop"})


def chat_lines(steps):
    yield ": OPENROUTER PROCESSING"
    calls = 0
    for kind, *step in steps:
        finish, usage, delta = None, None, {}
        if kind == "text":
            delta = {"content": step[0]}
        elif kind == "thinking":
            delta = {"reasoning_content": step[0]}
        elif kind == "call":
            text = step[1] if isinstance(step[1], str) else json.dumps(step[1])
            yield "data: " + dumps({"choices": [{"delta": {"tool_calls": [{
                "index": calls, "id": f"call_{calls}", "function": {"name": step[0],
                                                                    "arguments": text[:5]}}]}}]})
            delta = {"tool_calls": [{"index": calls, "function": {"arguments": text[5:]}}]}
            calls += 1
        else:
            finish = {"max_tokens": "length", "tool_use": "tool_calls"}.get(step[0], "stop")
            usage = {"prompt_tokens": step[1], "completion_tokens": step[2]}
            if kind == "stop":  # it is not told of them
                delta = {"content": f"{step[0]} never shown"}
        yield "data: " + dumps({"choices": [{"delta": delta, "finish_reason": finish}]})
        yield ""
        if usage:
            yield "data: " + dumps({"choices": [], "usage": usage})
            yield ""
            yield "data: [DONE]"


WIRES = {"ollama": ollama_lines, "messages": messages_lines, "chat": chat_lines}
BACKENDS = {"ollama": "ollama", "llamacpp": "chat", "lmstudio": "chat", "vllm": "chat",
            "openai": "chat", "anthropic": "messages"}


def stream_of(provider, steps, dialect="messages"):
    """The bytes of a node's whole answer; a cloud is asked Messages only for who speaks them."""
    kind = "application/x-ndjson" if provider == "ollama" else "text/event-stream"
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n"
    wire = BACKENDS[provider]
    if wire == "messages" and dialect != "messages":
        wire = "chat"
    lines = WIRES[wire](steps)
    return head.encode() + "".join(f"{line}\n" for line in lines).encode()


def message_of(steps):
    """The bytes of a cloud's answer that is no stream."""
    blocks, last = [], {}
    for kind, *step in steps:
        if kind in ("thinking", "text"):
            if not blocks or blocks[-1]["type"] != kind:
                blocks.append({"type": kind, kind: ""})
            blocks[-1][kind] += step[0]
        elif kind == "call":
            blocks.append({"type": "tool_use", "id": f"toolu_{len(blocks)}", "name": step[0],
                           "input": step[1]})
        else:
            last = {"stop_reason": step[0] if kind == "end" else "stop_sequence",
                    "stop_sequence": None if kind == "end" else step[0],
                    "usage": {"input_tokens": step[1], "output_tokens": step[2]}}
    body = json.dumps({"type": "message", "role": "assistant", "content": blocks, **last}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def refusal_of(provider, status, words):
    error = words if provider == "ollama" else {"code": status, "message": words, "type": "x"}
    body = json.dumps({"error": error}).encode()
    return b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


def heard_of(request):
    """What a node was told, whatever it speaks: (words of the user, names of tools, images)."""
    texts, images = [], 0
    for message in request["messages"]:
        images += len(message.get("images", ()))
        content = message.get("content") or ""
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
        for block in blocks:
            inside = block.get("content") or []
            if isinstance(inside, str):
                inside = [{"type": "text", "text": inside}]
            for part in [block, *inside]:
                images += part["type"] in ("image", "image_url")
                if part["type"] == "text":
                    texts.append(part["text"])
    tools = [tool.get("function", tool)["name"] for tool in request.get("tools", ())]
    return texts, tools, images


# -- what clients send and read --

def sse_of(body):
    events = []
    for block in body.decode().split("\n\n"):
        data = [line[6:] for line in block.split("\n") if line.startswith("data: ")]
        events += [json.loads(text) for text in data if text != "[DONE]"]
    return events


class MessagesClient:
    target = "/v1/messages"
    reasons = {}

    def request(self, said, *, tools=(), stops=(), most=100, stream=False):
        messages = []
        for kind, *words in said:
            role, block = "user", {"type": "text", "text": words[0]}
            if kind == "image":
                block = {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                                     "data": words[0]}}
            elif kind == "call":
                role = "assistant"
                block = {"type": "tool_use", "id": words[0], "name": words[1], "input": words[2]}
            elif kind == "result":
                block = {"type": "tool_result", "tool_use_id": words[0], "content": words[1]}
            messages.append({"role": role, "content": [block]})
        tools = [{"name": tool["name"], "description": tool["description"],
                  "input_schema": tool["schema"]} for tool in tools]
        return {"model": "x", "max_tokens": most, "messages": messages, "stream": stream,
                **({"tools": tools} if tools else {}),
                **({"stop_sequences": list(stops)} if stops else {})}

    def read(self, status, body, stream):
        if not stream or status != 200:
            message = json.loads(body)
            if status != 200:
                return Answer(status, "", "", [], "", (), message["error"]["message"], 0)
            return self.told(message["content"], message["stop_reason"], message["usage"])
        blocks, reason, usage, error, pings = [], "", {}, "", 0
        events = sse_of(body)
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(dict(event["content_block"]))
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                key = delta["type"].partition("_")[0]
                if key == "input":
                    key, delta = "json", {"json": delta["partial_json"]}
                blocks[-1][key] = blocks[-1].get(key, "") + delta[key]
            elif event["type"] == "message_start":
                usage = event["message"]["usage"]
            elif event["type"] == "message_delta":
                reason, usage = event["delta"]["stop_reason"], {**usage, **event["usage"]}
            elif event["type"] == "error":
                error = event["error"]["message"]
            pings += event["type"] == "ping"
        assert error or events[-1]["type"] == "message_stop"
        return self.told(blocks, reason, usage)._replace(error=error, pings=pings)

    def told(self, blocks, reason, usage):
        text = "".join(block.get("text", "") for block in blocks)
        thinking = "".join(block.get("thinking", "") for block in blocks)
        calls = [(block["name"], json.loads(block["json"]) if "json" in block else block["input"],
                  block["id"]) for block in blocks if block["type"] == "tool_use"]
        tokens = (usage.get("input_tokens"), usage.get("output_tokens"))
        return Answer(200, text, thinking, calls, reason, tokens, "", 0)


class ChatClient:
    target = "/v1/chat/completions"
    reasons = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length",
               "tool_use": "tool_calls"}

    def request(self, said, *, tools=(), stops=(), most=100, stream=False):
        messages = []
        for kind, *words in said:
            if kind == "call":
                messages.append({"role": "assistant", "content": None, "tool_calls": [{
                    "id": words[0], "type": "function", "function": {
                        "name": words[1], "arguments": json.dumps(words[2])}}]})
            elif kind == "result":
                messages.append({"role": "tool", "tool_call_id": words[0], "content": words[1]})
            elif kind == "image":
                messages.append({"role": "user", "content": [{"type": "image_url", "image_url": {
                    "url": f"data:image/png;base64,{words[0]}"}}]})
            else:
                messages.append({"role": "user", "content": words[0]})
        tools = [{"type": "function", "function": {"name": tool["name"], "parameters":
                                                   tool["schema"]}} for tool in tools]
        return {"model": "x", "max_tokens": most, "messages": messages, "stream": stream,
                "stream_options": {"include_usage": True} if stream else None,
                **({"tools": tools} if tools else {}), **({"stop": list(stops)} if stops else {})}

    def read(self, status, body, stream):
        if not stream or status != 200:
            whole = json.loads(body)
            if status != 200:
                return Answer(status, "", "", [], "", (), whole["error"]["message"], 0)
            choice = whole["choices"][0]
            message = choice["message"]
            calls = [(call["function"]["name"], json.loads(call["function"]["arguments"]), call["id"])
                     for call in message.get("tool_calls") or ()]
            return Answer(200, message.get("content") or "", message.get("reasoning_content") or "",
                          calls, choice["finish_reason"], self.tokens(whole["usage"]), "", 0)
        text, thinking, drafts, reason, tokens, error = "", "", {}, "", (), ""
        for event in sse_of(body):
            if "error" in event:
                error = event["error"]["message"]
                continue
            tokens = self.tokens(event["usage"]) if event.get("usage") else tokens
            for choice in event["choices"]:
                delta = choice["delta"]
                text += delta.get("content") or ""
                thinking += delta.get("reasoning_content") or ""
                reason = choice.get("finish_reason") or reason
                for call in delta.get("tool_calls", ()):
                    draft = drafts.setdefault(call["index"], ["", "", ""])
                    draft[0] += call["function"].get("name") or ""
                    draft[1] += call["function"].get("arguments") or ""
                    draft[2] += call.get("id") or ""
        assert error or b"data: [DONE]" in body
        calls = [(name, json.loads(arguments), own_id) for name, arguments, own_id in drafts.values()]
        pings = body.count(b"\n: ") + body.startswith(b": ")
        return Answer(200, text, thinking, calls, reason, tokens, error, pings)

    def tokens(self, usage):
        return usage["prompt_tokens"], usage["completion_tokens"]


class ResponsesClient:
    target = "/v1/responses"
    reasons = None  # it names none

    def request(self, said, *, tools=(), stops=(), most=100, stream=False):
        items = []
        for kind, *words in said:
            if kind == "call":
                items.append({"type": "function_call", "call_id": words[0], "name": words[1],
                              "arguments": json.dumps(words[2])})
            elif kind == "result":
                items.append({"type": "function_call_output", "call_id": words[0],
                              "output": words[1]})
            else:
                part = {"type": "input_text", "text": words[0]}
                if kind == "image":
                    part = {"type": "input_image", "image_url": f"data:image/png;base64,{words[0]}"}
                items.append({"type": "message", "role": "user", "content": [part]})
        tools = [{"type": "function", "name": tool["name"], "parameters": tool["schema"]}
                 for tool in tools]
        return {"model": "x", "max_output_tokens": most, "input": items, "stream": stream,
                **({"tools": tools} if tools else {})}

    def read(self, status, body, stream):
        if status != 200:
            return Answer(status, "", "", [], "", (), json.loads(body)["error"]["message"], 0)
        whole, error, pings = None, "", 0
        if stream:
            for event in sse_of(body):
                if event["type"] in ("response.completed", "response.incomplete", "response.failed"):
                    whole = event["response"]
                pings += event["type"] == "response.in_progress"
        else:
            whole = json.loads(body)
        assert whole, body
        if whole.get("error"):
            error = whole["error"]["message"]
        text = thinking = ""
        calls = []
        for item in whole["output"]:
            if item["type"] == "message":
                text += "".join(part.get("text", "") for part in item["content"])
            elif item["type"] == "reasoning":
                parts = [*item.get("content", ()), *item.get("summary", ())]
                thinking += "".join(part.get("text", "") for part in parts)
            elif item["type"] == "function_call":
                calls.append((item["name"], json.loads(item["arguments"]), item["call_id"]))
        usage = whole.get("usage") or {}
        tokens = (usage.get("input_tokens"), usage.get("output_tokens"))
        return Answer(200, text, thinking, calls, whole["status"], tokens, error, max(pings - 1, 0))


CLIENTS = {"messages": MessagesClient(), "chat": ChatClient(), "responses": ResponsesClient()}
