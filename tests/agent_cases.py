"""Agent files, and why Claude Code does not run each one ("": it does).

What is listed was seen with Claude Code 2.1.197 and 2.1.327; tests/live asks them again.
"""
HEAD = "---\nname: a\ndescription: d\n"
CLOSED = "its frontmatter is not closed"
BEFORE, NONE, UNSAID = "there is text before the first `---`", "it has no frontmatter", \
    "it has no description"
AGENTS = [
    (HEAD + "---\n", ""),
    (HEAD + "tools: Read, Grep\n---\nbody", ""),
    (HEAD + "tools: [Read]\n---\n", ""),
    (HEAD + "tools:\n  - Read\n  - Grep\n---\n", ""),
    (HEAD + "tools:\n- NoSuchTool\n- Read\n---\n", ""),
    (HEAD + "tools: \"*\"\n---\n", ""),
    (HEAD + "tools: mcp__github__search\n---\n", ""),
    (HEAD + "tools: Bash(git *), MultiEdit\n---\n", ""),
    (HEAD + "tools: Task\n---\n", ""),
    (HEAD + "tools: AskUserQuestion\n---\n", ""),
    (HEAD + "tools: Read Grep\n---\n", ""),
    (HEAD + "tools:\nmodel: x\n---\n", ""),
    (HEAD + "---\n<!-- generated -->\n", ""),
    (HEAD + "# a comment\n---\n", ""),
    (HEAD.replace("\n", "\r\n") + "---\r\n", ""),
    (HEAD + "  ---\nbody\n", ""),
    ("--- \nname: a\ndescription: Use this: when x: y\n--- \n", ""),
    ("---\nname: a\ndescription: |\n  two\n  lines\n---\n", ""),
    ("---\nname: a\ndescription: one\n  two\n---\n", ""),
    ("---\nname: a\ndescription: 'q'\n---\n", ""),
    ("---\nname: a\ndescription: [unclosed\n---\n", ""),
    ("---\nname: a\ndescription: *star and @at\n---\n", ""),
    ("---\nname: a\ndescription: x --- y\n---\n", ""),
    ("---\nname: a # why\ndescription: d\n---\n", ""),
    ("---\n name: a\n description: d\n---\n", ""),
    ("---\n\"name\": a\n\"description\": d\n---\n", ""),
    ("---\nname : a\ndescription : d\n---\n", ""),
    ("---\n{name: a, description: d}\n---\n", ""),
    (HEAD + "description: e\n---\n", ""),
    (HEAD + "model: x\nmodel: y: z\n---\n", ""),
    ("<!-- generated -->\n" + HEAD + "---\n", BEFORE),
    ("\n" + HEAD + "---\n", BEFORE),
    ("-" + HEAD + "----\n", CLOSED),
    ("Just text.\n", NONE),
    ("", NONE),
    (HEAD, CLOSED),
    (HEAD + "...\nbody\n", CLOSED),
    ("---name: a\n---\n", CLOSED),
    ("---\ndescription: d\n---\n", "it has no name"),
    ("---\nName: a\nDescription: d\n---\n", "it has no name"),
    ("---\nname:\ndescription: d\n---\n", "it has no name"),
    ("---\nname: \"\"\ndescription: d\n---\n", "it has no name"),
    ("---\nname: a\n---\n", UNSAID),
    ("---\nname: a\ndescription: \"\"\n---\n", UNSAID),
    ("---\nname: a\ndescription: # later\n---\n", UNSAID),
    ("---\nname: a\ndescription: >\n---\n", UNSAID),
    (HEAD + "version: 2024-01-01\nenabled: yes\ncolor: on\nrank: 1_0\n---\n", ""),
    (HEAD + "when:\n  on: off\n---\n", ""),
]
# What Claude Code leaves out, too (2.1.327), and is not ours to judge: another version may not.
UNJUDGED = [
    "---\nname: 42\ndescription: d\n---\n", "---\nname: true\ndescription: d\n---\n",
    "---\nname: -a\ndescription: d\n---\n", "---\nname: kit:a\ndescription: d\n---\n",
    "---\nname: a\ndescription: 5\n---\n", "---\nname: a\ndescription: one\ntwo\n---\n",
    "---\nname: a\ndescription: one\n  two: three\n---\n", "---\nname: a\ndescription: - x\n---\n",
    "---\nname: a\ndescription: \"open\n---\n", "---\nname: 'a\ndescription: d\n---\n",
    HEAD + "tools: read, grep\n---\n", HEAD + "tools: MultiEdit\n---\n",
    HEAD + "tools: [NoSuchTool]\n---\n", HEAD + "tools:\n  - LS\n---\n",
]
