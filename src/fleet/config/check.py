"""From a parsed fleet file to a Fleet, or to its problems."""
from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from fleet.config.address import LOOPBACK, split_endpoint
from fleet.config.keys import PLACES, keys_of, name_rule, section_of
from fleet.config.names import leaves_house
from fleet.config.node import NODE_KINDS
from fleet.config.rules import RULES, TARGET_NAMES, fix_value, show_entry
from fleet.config.sections import Agent, Fleet, FleetFile, Model, Node, Project
from fleet.start.constants import CONFIG_NAMES, OLLAMA_ENDPOINT, TIERS
from fleet.start.errors import Finding, FleetError
from fleet.start.record import REQUIRED, fields, replace
from fleet.text.phrases import find_nearest, join_words, nearest, show_value, some_of
from fleet.text.yaml_dump import quote_yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TypeVar

    from fleet.config.rules import Rule
    from fleet.config.sections import Gateway
    from fleet.start.record import Field, Record
    from fleet.text.yaml import Document
    _Section = TypeVar("_Section", bound=Record)


# Makes a Fleet of a Document, or a Finding for each mistake in it. Each mistake is reported
# once, with what to type.

# Claude Code resolves these words itself, so an alias must not be one (2.1.326).
CLAUDE_WORDS = ("sonnet", "opus", "haiku", "fable", "best", "inherit", "default", "opusplan")
AGENT_OWN_KEYS = ("name", "description", "model", "tools")  # never in `frontmatter`
FINDINGS_LIMIT = 100  # a file with more mistakes is not a fleet file


class Checker:
    """Reads the sections of a `document` into records and collects `findings` about them.

    In a record, a wrong value is replaced by its default, or by None. An unknown key is
    reported, then read as the key that was probably meant.
    """

    def __init__(self, document: Document) -> None:
        self.document = document
        self.findings: list[Finding] = []
        self.shallow: set[tuple] = set()  # reported already, as too little indented
        self.references: list[tuple[tuple, str]] = []  # where, to which name

    def error(self, slug: str, path: tuple, what: str, *, fix: str = "",
              key: bool = False) -> None:
        """Report what is wrong with a value (`what` follows its path), or with a `key`."""
        if len(self.findings) == FINDINGS_LIMIT:
            raise FleetError("too-many", "and more; fix these first")
        if not key:
            what = f"{_dotted(path)} {what}"
        where, excerpt = self.document.locate(path, key=key)
        finding = Finding(slug, "error", what, where, excerpt, fix)
        if finding not in self.findings:  # two values may share one mistake
            self.findings.append(finding)

    def section(self, kind: type[_Section], path: tuple, section: Any) -> _Section:
        """Check a mapping of known keys; return its record."""
        values: dict[str, Any] = {
            name: {} if field.kind.startswith("dict") else None
            for name, field in fields(kind).items() if field.default is REQUIRED}
        if name_rule(kind):
            values["name"] = path[-1]
        if not isinstance(section, dict):
            inside = keys_of(kind).keys()
            if section is not None or not self.find_shallow(path, inside.__contains__):
                self.error("not-mapping", path, f"must hold keys, not {show_value(section)}",
                           fix=_suggest_keys(kind, path, section))
            return kind(**values)

        self.find_shallow_names(kind, path, section)
        spellings = self.spell(kind, path, section)
        for key in keys_of(kind).values():
            name = spellings.get(key.key, key.key)
            if name in section:
                # Later lookups of its place use its first spelling.
                places, at = self.document.places, (*path, name)
                if at in places:
                    places.setdefault((*path, key.key), places[at])
                is_wrong = key.rule and name not in (key.key, key.also)
                step = (*path, key.key if is_wrong else name)
                checked = self.key(key, step, section[name])
                if checked is not None:
                    values[key.name] = checked
            elif key.default is REQUIRED:
                self.error("missing-key", (*path, name), "is missing",
                           fix=f"add `{name}:` ({key.words})")
        if kind is Model:
            values["name_key"] = spellings.get("model", "model")
        return kind(**values)

    def find_shallow_names(self, kind: type[Record], path: tuple, section: dict) -> None:
        """Report names that stand beside an empty `nodes:` or `tasks:` and belong inside it."""
        keys = keys_of(kind)
        for name, key in keys.items():
            if key.kind.startswith("dict") and section.get(name, "") is None:
                self.find_shallow((*path, name), lambda other: isinstance(
                    section[other], dict) and not find_nearest(str(other), keys))

    def find_shallow(self, path: tuple, is_inside: Callable[[Any], bool]) -> bool:
        """Report entries that stand beside an empty section and belong inside it, if there are any.

        Those are the entries directly below it for which `is_inside` is true.
        """
        beside = self.document.value
        for step in path[:-1]:
            beside = beside[step]
        below = [*beside][[*beside].index(path[-1]) + 1:]
        names = [*itertools.takewhile(is_inside, below)]
        if names:
            self.shallow.update({path, *((*path[:-1], name) for name in names)})
            shown = join_words([f"`{name}:`" for name in names])
            self.error("not-indented", (*path[:-1], names[0]), key=True,
                       what=f"{_dotted(path)} is empty: {shown} "
                            f"{'is' if len(names) == 1 else 'are'} beside it, not inside it",
                       fix=f"put more spaces before {shown} than before `{path[-1]}:`")
        return bool(names)

    def spell(self, kind: type[Record], path: tuple, section: dict) -> dict[str, str]:
        """Return {key: its name in the section}; report unknown and repeated keys."""
        keys = keys_of(kind)
        words = {}
        for key in keys.values():
            others = f"{key.also} {key.others}".replace("_", "").split()
            words.update(dict.fromkeys(others, key.key))
        spellings = {name: name for name in keys if name in section}
        for name in section:
            if name in keys or (*path, name) in self.shallow:
                continue
            word = str(name).lower()
            meant = words.get(re.sub("[^a-z]", "", word)) or find_nearest(word, keys)
            slug, what = "unknown-key", f"unknown key {show_value(name)} in {_dotted(path)}"
            if meant and name == keys[meant].also:
                if spellings.setdefault(meant, name) == name:
                    continue
                slug = "two-spellings"
                what = f"{_dotted(path)} has `{meant}` and `{name}`, two spellings of one key"
            if meant in spellings:
                fix = f"remove it: `{spellings[meant]}:` is already there"
            elif meant:
                spellings[meant] = name
                fix = f"did you mean `{meant}`?"
            else:
                fix = _suggest_place(kind, path, name)
            self.error(slug, (*path, name), what, key=True, fix=fix)
        return spellings

    def key(self, key: Field, path: tuple, value: Any) -> Any:
        """Check a value by the rule or the section of its key; return it in normal form."""
        if key.rule:
            return self.value(key.rule, path, value, key.default)
        section = section_of(key)
        names = name_rule(section)
        if names:
            return self.named(section, names, path, value)
        return self.section(section, path, value)

    def value(self, rule: Rule, path: tuple, value: Any, default: Any = REQUIRED) -> Any:
        """Check a value by a rule; return it in normal form."""
        if rule.item and isinstance(value, list):
            return tuple(self.value(rule.item, (*path, place), each)
                         for place, each in enumerate(value))
        is_text = isinstance(value, str)
        if rule is RULES["reference"] and is_text and value:
            self.references.append((path, value))  # checked when all names are known
            return value

        slug, why = "bad-value", f"; accepted: {rule.words}"
        if rule.fits(value):
            try:
                return rule.read(value)
            except FleetError as error:
                slug, why = error.slug, f": {error.what}"
        shown = show_value(value)
        if is_text and rule.schema.get("type") != "string":
            shown = f'`"{value[:60]}"`'  # the quotes are what is wrong
        self.error(slug, path, f"is {shown}{why}", fix=_suggest_value(rule, path, value, default))
        return None

    def named(self, kind: type[_Section], rule: Rule, path: tuple, value: Any
              ) -> dict[str, _Section]:
        """Check a mapping of names to sections; return {name: record}."""
        if path in self.shallow:
            return {}
        if not isinstance(value, dict) or not value and kind is not Agent:
            self.error("not-mapping", path,
                       f"must hold {path[0]} by name, not {show_value(value or None)}",
                       fix=f"write `{path[0]}:`, below it a name, below that its keys")
            return {}
        records = {}
        for name, section in value.items():
            if (*path, name) in self.shallow:
                continue
            if (kind in PLACES and name in keys_of(FleetFile)
                    and name not in self.document.value):
                self.error("misplaced-section", (*path, name), key=True,
                           what=f"`{name}:` is inside `{path[0]}:`",
                           fix=f"move it: `{name}:` belongs to column 1")
                continue
            is_name = rule.fits(name)
            if not is_name:
                meant = fix_value(name, rule)
                why = f"is not a valid name; accepted: {rule.words}"
                if not isinstance(name, str):
                    text = "null" if name is None else str(name).lower()
                    meant = meant or (text if rule.fits(text) else None)
                    why = "is not text without quotes, and a name is text"
                fix = f"write `{quote_yaml(str(meant))}:`" if meant else "rename it"
                self.error("bad-name", (*path, name), key=True, fix=fix,
                           what=f"{path[0]}: {show_value(name)} {why}")
            if is_name or isinstance(section, dict):
                records[name] = self.section(kind, (*path, name), section)
        return records

    def reference(self, path: tuple, name: str | None, records: Mapping[str, Any],
                  kind: str) -> None:
        """Report a name that no section of that kind has."""
        if name is None or name in records or name in map(str, records) or not records:
            return
        records = {known: record for known, record in records.items()
                   if path[:2] != (f"{kind}s", known)}  # a model's fallback is not itself
        others = {}  # what people write for a name: the address of a node, a model's
        for known, record in records.items():
            if isinstance(record, Node) and record.endpoint:
                words = (record.endpoint, split_endpoint(record.endpoint).host)
                others.update(dict.fromkeys(words, known))
            elif isinstance(record, Model):
                others.update({str(record.ollama_model): known, str(record.alias): known})
        fix = nearest(name, records, others)
        if len(name) > 60:
            name = f"{name[:60]}…"
        self.error(f"unknown-{kind}", path, f"references unknown {kind}: {name}",
                   fix=fix or (f"known {kind}s: {some_of(records)}" if records
                               else "remove it"))


def _dotted(path: tuple) -> str:
    return ".".join(map(str, path)) or "the file"


def _suggest_value(rule: Rule, path: tuple, value: Any, default: Any) -> str:
    """Return what to type instead of a value that a rule refuses."""
    name = path[-1] if isinstance(path[-1], str) else ""  # an item of a list has none
    meant = fix_value(value, rule)
    if meant is not None:
        return f"write `{show_entry(name, meant)}`"
    if default not in (REQUIRED, None, ()):
        return f"write `{show_entry(name, default)}`, the default"
    fix = f"write {rule.words}"
    if rule.example is not None:
        fix = f"write `{show_entry(name, rule.example)}`, for example"
    return fix if default is REQUIRED else f"{fix}, or remove the line"


def _suggest_place(kind: type[Record], path: tuple, name: object) -> str:
    """Return where an unknown key belongs, or else the known keys of its section."""
    if name == "name" and name_rule(kind):
        return f"remove it: the {path[0][:-1]}'s name is the key above"
    for home, place in PLACES.items():
        if name in keys_of(home):
            return f"move it: `{name}:` belongs to {place}"
    known = f"known keys: {', '.join(keys_of(kind))}"
    if kind is Agent:
        return f"{known}; Claude Code's others go under `frontmatter:`"
    return known if kind is not FleetFile else f"{known}; indent a name under one of them"


def _suggest_keys(kind: type[Record], path: tuple, value: object) -> str:
    """Return what to write instead of a value where keys are expected."""
    keys = keys_of(kind)
    if name_rule(kind) and path[-1] in keys:
        return f"indent `{path[-1]}:` deeper, under its {path[0][:-1]}"
    name, _, rest = str(value).partition(":")
    if name in keys:
        return f"put a space after the colon: `{name}: {rest}`"
    for key in keys.values():
        meant = key.rule and (fix_value(value, key.rule) or key.rule.example)
        if meant:  # one value alone is most likely that of the first key that can hold it
            entry = show_entry(key.key, meant)
            return f"write its keys on the lines below, such as `{entry}`"
    return f"known keys: {', '.join(keys)}"


def check_fleet(document: Document) -> tuple[Fleet | None, list[Finding]]:
    """Return (Fleet, []) for a file that was read, or (None, everything that is wrong)."""
    if document.value is None:
        return None, [_empty_file(document)]
    check = Checker(document)
    last = []
    try:
        file = check.section(FleetFile, (), document.value)
        project = file.project or Project("")
        _check_references(check, file.nodes, file.models)
        for agent in file.agents.values():
            _check_agent(check, agent)
        for node in file.nodes.values():
            _check_node(check, node, project.gateway)
        for model in file.models.values():
            _check_model(check, model, file.nodes.get(model.node))
    except FleetError as error:  # too many
        last = [error.finding]

    if check.findings:
        return None, sorted(check.findings, key=finding_order) + last
    tiers = {tier: getattr(project.claude, tier) for tier in TIERS}
    return Fleet(
        name=project.name, gateway=project.gateway,
        claude={tier: name for tier, name in tiers.items() if name},
        targets=tuple(name for name in TARGET_NAMES if name in (*project.targets, "env")),
        nodes={name: replace(node, endpoint=split_endpoint(
            node.endpoint, NODE_KINDS[node.provider].port or 80).url)
            for name, node in file.nodes.items()},
        models=file.models, agents=file.agents, document=document,
        lean=project.claude.lean), []


def _empty_file(document: Document) -> Finding:
    where, excerpt = document.locate(())
    what = ("the file is empty; it needs `project:` with a `name:`, "
            "`nodes:`, `models:`, `agents:`")
    fix = "subagent-fleet init --force"  # a file is there, so `init` alone would refuse
    source = document.source
    if source != CONFIG_NAMES[0] and re.fullmatch("[A-Za-z0-9._/-]+", source):
        fix += f" --output {source}"
    return Finding("empty-file", "error", what, where, excerpt, fix)


def finding_order(finding: Finding) -> list[int]:
    """Return line and column, by which findings are sorted."""
    return [int(number) for number in finding.where.split(":")[-2:]]


def _check_references(check: Checker, nodes: dict[str, Node],
                      models: dict[str, Model]) -> None:
    """Report unknown names, and models that fall back to themselves."""
    # Two models may fall back on each other: of a chain only the first step is taken, and
    # LiteLLM takes no more than five (1.106.2: `a` and `b` both dead answered in 0.06 s).
    for path, name in check.references:
        if path[-1] == "node":
            check.reference(path, name, nodes, "node")
        elif path[:2] == ("models", name):
            check.error("fallback-cycle", path, "is the model itself",
                        fix=f"remove `{name}` from it")
        elif name not in models:
            check.reference(path, name, models, "model")


def _check_agent(check: Checker, agent: Agent) -> None:
    """Report keys that Claude Code would read twice, or not at all."""
    at = ("agents", agent.name, "frontmatter")
    for key in agent.frontmatter:
        if key in AGENT_OWN_KEYS:
            fix = f"write `{key}:` one level up"
        elif not re.fullmatch("[A-Za-z][A-Za-z0-9_-]{0,63}", str(key)):
            fix = "rename it"
        else:
            continue
        check.error("bad-frontmatter", (*at, key), key=True, fix=fix,
                    what=f"{_dotted(at)} cannot hold the key {show_value(key)}")


def _check_node(check: Checker, node: Node, gateway: Gateway) -> None:
    """Report endpoints that may not get a person's login."""
    at = split_endpoint(node.endpoint or OLLAMA_ENDPOINT)
    for is_wrong, what, fix in (
            (node.provider != "anthropic", "is only for `provider: anthropic`",
             "remove it, or write `api_key_env:`"),
            (node.api_key_env, "and `api_key_env` are two ways to log in",
             "remove one of them"),
            (gateway.provider == "litellm", "needs this program's own gateway: "
             "LiteLLM cannot tell its key from a login",
             "write `provider: builtin` under project.gateway"),
            (at.scheme == "http" and not LOOPBACK.fullmatch(at.host),
             "would send the login unencrypted", "write https://")):
        if node.auth and is_wrong:
            check.error("bad-auth", ("nodes", node.name, "auth"), what, fix=fix)
            return


def _check_model(check: Checker, model: Model, node: Node | None) -> None:
    """Report names that mean something else to other programs, and what leaves the house."""
    path = ("models", model.name)
    alias = model.alias or ""
    if alias.lower() in CLAUDE_WORDS:
        check.error("reserved-alias", (*path, "alias"),
                    f"is `{alias}`: Claude Code gives `{alias}` a meaning of its own",
                    fix=f"write `claude-{alias.lower()}-local`")
    where = ""
    if node and node.provider == "anthropic":
        where = f"at {node.endpoint}: everything you send it leaves your network"
    elif (not node or node.provider == "ollama") and leaves_house(model.ollama_model or ""):
        where = (f"`{model.ollama_model}`: Ollama sends this to ollama.com; it does not run "
                 "on your machine")
    if where and not model.cloud:
        check.error("cloud-model", (*path, model.name_key), f"is {where}",
                    fix="choose a local model, or add `cloud: true`")
