#!/usr/bin/env python3
"""Write scripted models: GGUF files a real engine runs, whose answers are known beforehand.

One block with zero attention and feed-forward weights leaves the last token of the prompt as the
only thing that decides, and the output matrix is a table "after this token comes that one".
The chat template ends the prompt with a cue, `<|cue:pong|>`, so the template writes the play:

    a user message may hold a line  `@play agent:planner agent:reviewer done`
    and the n-th answer after it is the n-th step (the last one stays); without such a line
    the model's own default play is used.  Steps: see `phrases` below.

A step that calls a tool is played only where the request offers that tool; else `read`, else `pong`.
Needs the packages gguf and numpy.
"""

from __future__ import annotations

import argparse
import functools
import json
import pydoc_data.topics
import re
import sys
from collections import Counter
from pathlib import Path

import gguf
import numpy

AGENTS = ("planner", "implementer", "reviewer", "summarizer")
WIDTH = 64          # room for the tokens that speak; every other token embeds as zero
HEAD = 16           # small heads: the attention is zero, but its time is not
CONTEXT = 262144
MERGES = 1500       # a bare byte vocabulary makes Claude Code's first prompt 48,000 tokens
CERTAIN = 40.0      # the logit of the one right successor before the norm's factor of sqrt(WIDTH)
END = "<|im_end|>"

# model file -> (default play, whether it thinks, inner width). The widths make the sizes: `init`
# takes the largest model as heavy and the smallest as small.
MODELS = {
    "dispatcher": ("agent:planner agent:reviewer done", False, 4096),
    "worker": ("bash done", False, 32),
    "shared": ("bash done", False, 128),
    "pong": ("pong", False, 128),
    "talker": ("talk", False, 128),
    "thinker": ("think", True, 128),
}

# Models that `bench` asks: model file -> (how it calls a tool, trained context).
BENCH_MODELS = {
    "able": ("call", CONTEXT),
    "printer": ("print", CONTEXT),
    "short": ("call", 8192),
}


def call(name, /, **arguments):
    """Write one tool call as the chat template shows it; arguments in the schema's order."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def printed(name, /, **arguments):
    """Write one tool call as models do that were not trained for it."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"```json\n{body}\n```"


def agent(name):
    return call("Agent", description=f"ask {name}", prompt="@play bash done", subagent_type=name)


def phrases():
    """Give step -> tokens it prints. A token that names itself as successor never stops."""
    steps = {
        "pong": ["PONG"],
        "done": ["DONE"],
        "count": ["one ", "two ", "three ", "four ", "five"],
        "talk": ["talk ", "talk "],
        "think": ["<think>\nlet me see\n</think>\n\n", "PONG"],
        "bash": [call("Bash", command="echo hi")],
        "look": ["Let me look. ", call("Bash", command="echo look")],
        "read": [call("Read", file_path="README.md")],
        "both": [agent("planner") + "\n" + agent("reviewer")],
    }
    steps.update({f"agent:{name}": [agent(name)] for name in AGENTS})
    return steps


def run_phrases():
    """Give step -> tokens it prints: what agents of tasks do."""
    # Inside of a list the engine wants keys in alphabetical order: so Ollama hands on a schema.
    choices = [{"description": "a file", "label": "sqlite"},
               {"description": "a server", "label": "postgres"}]
    question = {"header": "DB", "multiSelect": False, "options": choices,
                "question": "Which database?"}
    commands = {"work": "echo work >> work.txt", "mend": "echo mended >> mended.txt",
                "nap": "sleep 3; echo slept", "long": "sleep 120; echo slept",
                # What README's three tasks come to: the first version of the parser is wrong.
                "wrong": "mkdir -p src tests; echo 'day = 1' > src/dates.py; echo 'from src.dates import day' "
                         "> tests/test_dates.py; echo 'def test_day(): assert day == 2' >> tests/test_dates.py",
                "right": "echo 'day = 2' > src/dates.py", "docs": "mkdir -p docs; echo told > docs/dates.md",
                "store": "echo 'name = 1' > src/store.py",
                "breach": "python3 -c \"open('secret.txt', 'w').write('x')\""}
    steps = {step: [call("Bash", command=command)] for step, command in commands.items()}
    return {"pong": ["PONG"], "done": ["All tests pass, the task is done."],
            "read": [call("Read", file_path="README.md")],
            "ask": [call("AskUserQuestion", questions=[question])], **steps}


WORDS = ("KESTREL", "MARBLE", "TUNDRA", "SAFFRON", "LANTERN")


def bench_phrases(how):
    """Give step -> tokens it prints: the right answers to what `bench` asks."""
    make = call if how == "call" else printed
    billing = {"service": "billing"}
    steps = {f"word {word}": [word] for word in WORDS}
    steps.update({
        "pong": ["PONG"],
        "numbers": ["7\n", "7\n"],
        "level": [make("set-log-level", **billing, level="debug")],
        "ticket": [make("open_ticket", title="Login fails", owner={"name": "Ada", "team": "web"})],
        "tests": [make("run_tests", paths=["tests/api", "tests/web"], stop_early=True)],
        "two": [make("set-log-level", **billing, level="error") + "\n"
                + make("set-log-level", service="search", level="info")],
        "sum": ["42"],
        "get": [make("get_setting", key="retry_limit")],
        "setting": ["It is 7391."],
    })
    return steps


# What the last message of a talk holds -> the step that answers it.
BENCH_CUES = {"numbers from 1": "numbers", "billing to debug": "level", "Open a ticket": "ticket",
              "Run the tests": "tests", "17 plus 25": "sum", "billing to error": "two",
              "the setting retry_limit": "get", "retry_limit = 7391": "setting"}
BENCH_TEMPLATE = r"""
{%- set ns = namespace(word='', last='', cue='pong') -%}
{%- if tools -%}
  {{- '<|im_start|>system\n# Tools\n' -}}
  {%- for tool in tools -%}{{- tool | tojson }}{{ '\n' -}}{%- endfor -%}
  {{- 'Call one as <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set ns.last = message.content if message.content is string else '' -%}
  {%- if 'The code word is ' in ns.last -%}
    {%- set ns.word = ns.last.split('The code word is ')[1].split('.')[0] -%}
  {%- endif -%}
  {{- '<|im_start|>' + message.role + '\n' + ns.last -}}
  {%- for tool_call in message.tool_calls or [] -%}
    {{- '\n<tool_call>\n{"name": "' + tool_call.function.name + '", "arguments": ' -}}
    {{- tool_call.function.arguments | tojson -}}
    {{- '}\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {%- if ns.word and 'the code word?' in ns.last -%}{%- set ns.cue = 'word ' + ns.word -%}{%- endif -%}
  @CUES@
  {{- '<|im_start|>assistant\n<|cue:' + ns.cue + '|>' -}}
{%- endif -%}
"""


def bench_template():
    cues = [f"{{%- if '{needle}' in ns.last -%}}{{%- set ns.cue = '{step}' -%}}{{%- endif -%}}"
            for needle, step in BENCH_CUES.items()]
    return BENCH_TEMPLATE.replace("@CUES@", "".join(cues)).strip()


TEMPLATE = r"""
{%- set ns = namespace(play='@DEFAULT@', step=0, tools='') -%}
{%- if tools -%}
  {{- '<|im_start|>system\n# Tools\n' -}}
  {%- for tool in tools -%}
    {%- set ns.tools = ns.tools + ' ' + tool.function.name + ' ' -%}
    {{- tool | tojson }}{{ '\n' -}}
  {%- endfor -%}
  {{- 'Call one as <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set text = message.content if message.content is string else '' -%}
  {%- if message.role == 'user' and '@play ' in text -%}
    {%- set ns.play = text.split('@play ')[-1].split('\n')[0].split('<')[0].strip() -%}
    {%- set ns.step = 0 -%}
  {%- elif message.role == 'assistant' -%}
    {%- set ns.step = ns.step + 1 -%}
  {%- endif -%}
  {%- if message.role == 'tool' -%}
    {{- '<|im_start|>user\n<tool_response>\n' + text + '\n</tool_response><|im_end|>\n' -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\n' -}}
    @THINKING@
    {{- text -}}
    {%- for tool_call in message.tool_calls or [] -%}
      {{- '\n<tool_call>\n{"name": "' + tool_call.function.name + '", "arguments": ' -}}
      {{- tool_call.function.arguments | tojson -}}
      {{- '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\n' + text + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {%- set steps = ns.play.split(' ') -%}
  {%- set cue = steps[ns.step] if ns.step < steps | length else steps[-1] -%}
  {%- if cue == 'think' and not (enable_thinking is defined and enable_thinking) -%}
    {%- set cue = 'pong' -%}
  {%- endif -%}
  {%- if (cue == 'bash' or cue == 'look') and ' Bash ' not in ns.tools -%}{%- set cue = 'read' -%}{%- endif -%}
  {%- if (cue == 'both' or 'agent:' in cue) and ' Agent ' not in ns.tools -%}{%- set cue = 'read' -%}{%- endif -%}
  {%- if cue == 'read' and ' Read ' not in ns.tools -%}{%- set cue = 'pong' -%}{%- endif -%}
  {{- '<|im_start|>assistant\n<|cue:' + cue + '|>' -}}
{%- endif -%}
"""
THINKING = r"""
    {%- if message.reasoning_content is string -%}
      {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' -}}
    {%- endif -%}
"""


def chat_template(default, thinking):
    text = TEMPLATE.replace("@DEFAULT@", default)
    return text.replace("@THINKING@", THINKING if thinking else "").strip()


def byte_alphabet():
    """Map each byte to the character GPT-2 vocabularies write it as."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain}
    table.update({byte: chr(256 + rank) for rank, byte in enumerate(spare)})
    return table


@functools.cache
def learn_merges():
    """Learn byte pairs from Python's own manual: English and code, and on every machine."""
    alphabet = byte_alphabet()
    text = "\n".join(pydoc_data.topics.topics.values())
    words = Counter(re.findall(r" ?[A-Za-z]+| ?[^\sA-Za-z0-9]+", text)).most_common(4000)
    split = [(["".join(alphabet[byte] for byte in letter.encode()) for letter in word], count)
             for word, count in words if word.isascii()]
    merges = []
    while len(merges) < MERGES:
        pairs = Counter()
        for pieces, count in split:
            for pair in zip(pieces, pieces[1:]):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        for pieces, _ in split:
            place = 0
            while place < len(pieces) - 1:
                if (pieces[place], pieces[place + 1]) == best:
                    pieces[place:place + 2] = ["".join(best)]
                place += 1
    return merges


class Vocabulary:
    """Tokens with their kinds, and which of them follows which."""

    def __init__(self, steps):
        self.alphabet = byte_alphabet()
        self.tokens = [self.alphabet[byte] for byte in range(256)]
        self.kinds = [gguf.TokenType.NORMAL] * 256
        self.after = {}
        self.merges = learn_merges()
        for pair in self.merges:
            self.add("".join(pair), gguf.TokenType.NORMAL)
        for text in ("<|endoftext|>", "<|im_start|>", END):
            self.add(text, gguf.TokenType.CONTROL)
        for step, said in steps.items():
            self.script(step, said)

    def add(self, text, kind):
        if text not in self.tokens:
            self.tokens.append(text)
            self.kinds.append(kind)
        return self.tokens.index(text)

    def script(self, step, said):
        """Chain cue -> printed tokens -> end of turn; a repeated token loops."""
        previous = self.add(f"<|cue:{step}|>", gguf.TokenType.CONTROL)
        for text in said:
            shown = "".join(self.alphabet[byte] for byte in text.encode("utf-8"))
            token = self.add(shown, gguf.TokenType.NORMAL)
            self.after[previous] = token
            previous = token
        self.after.setdefault(previous, self.tokens.index(END))

    def matrices(self):
        """Return the embedding (one-hot for tokens that speak) and the table as output matrix."""
        embedding = numpy.zeros((len(self.tokens), WIDTH), dtype=numpy.float32)
        output = numpy.zeros((len(self.tokens), WIDTH), dtype=numpy.float32)
        if len(self.after) > WIDTH:
            raise SystemExit(f"make_model: {len(self.after)} speaking tokens, room for {WIDTH}")
        for place, (token, successor) in enumerate(self.after.items()):
            embedding[token, place] = 1.0
            output[successor, place] = CERTAIN
        return embedding, output


def write_words(writer, words):
    """Write what every model of ours has: its tokens, and numbers of 32 bits."""
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(words.tokens))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.kinds)
    writer.add_token_merges([" ".join(pair) for pair in words.merges])
    writer.add_bos_token_id(words.tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(words.tokens.index(END))


def write_model(path, words, template, inner, context=CONTEXT):
    """Write one GGUF: llama architecture, one block that adds nothing."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(f"scripted {path.stem}")
    writer.add_context_length(context)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD)
    write_words(writer, words)
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)
    add_tensors(writer, words, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensors(writer, words, inner):
    embedding, output = words.matrices()
    zeros = lambda *shape: numpy.zeros(shape, dtype=numpy.float32)  # noqa: E731
    ones = numpy.ones(WIDTH, dtype=numpy.float32)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output_norm.weight", ones)
    writer.add_tensor("output.weight", output)
    writer.add_tensor("blk.0.attn_norm.weight", ones)
    writer.add_tensor("blk.0.ffn_norm.weight", ones)
    for name in ("attn_q", "attn_k", "attn_v"):
        writer.add_tensor(f"blk.0.{name}.weight", zeros(HEAD, WIDTH))
    writer.add_tensor("blk.0.attn_output.weight", zeros(WIDTH, HEAD))
    for name in ("ffn_gate", "ffn_up"):
        writer.add_tensor(f"blk.0.{name}.weight", zeros(inner, WIDTH))
    writer.add_tensor("blk.0.ffn_down.weight", zeros(WIDTH, inner))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    words = Vocabulary(phrases())
    for name, (default, thinking, inner) in MODELS.items():
        template = chat_template(default, thinking)
        write_model(directory / f"{name}.gguf", words, template, inner)
        print(directory / f"{name}.gguf")
    words = Vocabulary(run_phrases())
    # What is said in the middle of a turn comes with the result of a tool (2.1.327).
    template = chat_template("done", False).replace("message.role == 'user' and",
                                                    "message.role != 'assistant' and")
    write_model(directory / "runner.gguf", words, template, 128)
    print(directory / "runner.gguf")
    for name, (how, context) in BENCH_MODELS.items():
        words = Vocabulary(bench_phrases(how))
        write_model(directory / f"{name}.gguf", words, bench_template(), 128, context)
        print(directory / f"{name}.gguf")
    return 0


if __name__ == "__main__":
    sys.exit(main())
