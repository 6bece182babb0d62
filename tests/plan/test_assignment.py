"""Who does what where: `plan_assignment`, its reasons, and what holds for every fleet."""
import random
import sys

import pytest

import subagent_fleet as sf

TOOLS = ("completion", "tools")
THINKS = (*TOOLS, "thinking")


def model(name, gigabytes=5.0, capabilities=TOOLS, context=131072, **more):
    size = int(gigabytes * 1e9)
    return sf.NodeModel(name, size, capabilities=capabilities, trained_context=context, **more)


def node(name, *models, loaded=(), reason=""):
    held = tuple(sf.LoadedModel(name, 32768, 100, int(size * 1e9), "") for name, size in loaded)
    return sf.NodeState(name, f"http://{name}:11434", reason, models=models, loaded=held)


def measured(where, name, *, rate=None, tools=None, context=None):
    return sf.Measurement(
        where, f"http://{where}:11434", name, tokens=65536, answer_rate=rate, tools=tools,
        context=context)


CODER, OSS = model("qwen3-coder:30b", 19, parameters="30.5B"), model("gpt-oss:20b", 14, THINKS)
QWEN, SMALL = model("qwen3:8b", 5.2, THINKS, 40960), model("llama3.2:3b", 2)
LIAR, DEVSTRAL = model("qwen2.5-coder:32b", 20), model("devstral:24b", 14)
GEMMA, EMBED = model("gemma3:4b", 3.3, ("completion", "vision")), model("bge-m3", 1, ("embedding",))
SEES = model("qwen3-vl:30b", 19, (*TOOLS, "vision"))
STUB = model("gpt-oss:120b-cloud", 0, TOOLS, remote="https://ollama.com:443")
THREE = (node("laptop", QWEN, GEMMA), node("mini", CODER, OSS, LIAR), node("gpu", DEVSTRAL, SMALL))
WEAK = tuple(node(f"weak{number}", SMALL) for number in range(1, 5))
NOBODY = "no other model is strong enough"
ALONE = {"main session": "the strongest: 8 B", "reviewer": "the only model that can do it",
         "planner": "the fastest with 7 B parameters or more", "summarizer": "the fastest"}

# (what, nodes, their GB, {job: (model, node)}, {who else runs: where}, {job: why})
FLEETS = [
    ("one laptop", (node("laptop", QWEN, GEMMA),), {},
     dict.fromkeys(sf.JOBS, ("qwen3:8b", "laptop")), [], ALONE),
    ("two Macs with the same model", (node("mac1", CODER), node("mac2", CODER)), {},
     {"main session": ("qwen3-coder:30b", "mac1"), "implementer": ("qwen3-coder:30b", "mac1"),
      "reviewer": ("qwen3-coder:30b", "mac2"), "planner": ("qwen3-coder:30b", "mac2"),
      "summarizer": ("qwen3-coder:30b", "mac2")}, [],
     {"main session": "the strongest: 30.5 B, a coder",
      "reviewer": "the same model on another machine"}),
    ("three machines", THREE, {},
     {"main session": ("qwen3-coder:30b", "mini"), "implementer": ("qwen3-coder:30b", "mini"),
      "reviewer": ("devstral:24b", "gpu"), "planner": ("qwen3:8b", "laptop"),
      "summarizer": ("qwen3:8b", "laptop")}, [],
     {"reviewer": "the strongest on another machine, of another family",
      "planner": "the fastest with 7 B parameters or more", "summarizer": "the fastest off the main session's machine"}),
    ("a strong and four weak", (node("strong", CODER), *WEAK), {},
     {**dict.fromkeys(sf.JOBS, ("qwen3-coder:30b", "strong")),
      "summarizer": ("llama3.2:3b", "weak1")},
     [("llama3.2:3b", f"weak{number}") for number in (2, 3, 4)],
     {"reviewer": NOBODY, "summarizer": "a small model, the fastest off the main session's machine"}),
    ("only embeddings", (node("a", EMBED), node("b", EMBED)), {}, {}, [], {}),
    ("a model that prints tool calls", (node("a", LIAR, QWEN),), {},
     dict.fromkeys(sf.JOBS, ("qwen3:8b", "a")), [], ALONE),
    ("16 GB and two that do not fit together", (node("mac", model("qwen3:14b", 9.3), QWEN),),
     {"mac": 16}, dict.fromkeys(sf.JOBS, ("qwen3:14b", "mac")), [],
     {"main session": "the strongest: 14 B"}),
    ("a GPU box with 3B models only", (node("gpu", SMALL, model("qwen2.5:3b", 1.9)),), {},
     dict.fromkeys(sf.JOBS, ("llama3.2:3b", "gpu")), [], {"planner": "no other model fits"}),
    ("a GPU box with 3B models beside a laptop", (node("gpu", SMALL), node("laptop", QWEN)), {},
     {**dict.fromkeys(sf.JOBS, ("qwen3:8b", "laptop")), "summarizer": ("llama3.2:3b", "gpu")}, [],
     {"summarizer": "a small model, the fastest off the main session's machine"}),
    ("cloud stubs", (node("a", STUB, SMALL), node("b", STUB)), {},
     dict.fromkeys(sf.JOBS, ("llama3.2:3b", "a")), [], {}),
    ("one machine with everything", (node("studio", CODER, DEVSTRAL, OSS, QWEN, SMALL, EMBED),),
     {"studio": 128},
     {"main session": ("qwen3-coder:30b", "studio"), "implementer": ("qwen3-coder:30b", "studio"),
      "reviewer": ("devstral:24b", "studio"), "planner": ("qwen3:8b", "studio"),
      "summarizer": ("llama3.2:3b", "studio")}, [],
     {"reviewer": "of another family, on the main session's machine",
      "summarizer": "the fastest"}),
    ("two with vision", (node("a", SEES), node("b", SEES, GEMMA)), {},
     {"main session": ("qwen3-vl:30b", "a"), "implementer": ("qwen3-vl:30b", "a"),
      "reviewer": ("qwen3-vl:30b", "b"), "planner": ("qwen3-vl:30b", "b"),
      "summarizer": ("qwen3-vl:30b", "b")}, [], {}),
    ("twenty machines", tuple(node(f"m{number:02}", [CODER, DEVSTRAL, QWEN, SMALL][number % 4])
                              for number in range(20)), {},
     {"main session": ("qwen3-coder:30b", "m00"), "implementer": ("qwen3-coder:30b", "m00"),
      "reviewer": ("devstral:24b", "m01"), "planner": ("qwen3:8b", "m02"),
      "summarizer": ("qwen3:8b", "m06")},
     [("devstral:24b", f"m{number:02}") for number in (5, 9, 13, 17)]
     + [("llama3.2:3b", f"m{number:02}") for number in (3, 7, 11, 15, 19)]
     + [("qwen3-coder:30b", f"m{number:02}") for number in (4, 8, 12, 16)]
     + [("qwen3:8b", f"m{number:02}") for number in (10, 14, 18)], {}),
]


def read_back(states, **more):
    """The fleet that `init` would write, and its warnings."""
    starter = sf.plan_starter(states, **more)
    text = sf.render_starter(starter.tree, starter.has_models, notes=starter.notes)
    fleet, problems = sf.check_fleet(sf.Document(text, "fleet.yaml"))
    assert problems == []
    return fleet, list(sf.lint_fleet(fleet))


@pytest.mark.parametrize("states, memory, jobs, others, why", [row[1:] for row in FLEETS],
                         ids=[row[0] for row in FLEETS])
def test_fleets_are_assigned_as_a_person_would(states, memory, jobs, others, why):
    plan = sf.plan_assignment(states, memory=memory)
    done = {job: (plan.model(job).ollama_model, plan.model(job).node) for job in plan.jobs}
    assert done == jobs
    assert sorted((one.model.ollama_model, one.model.node) for one in plan.placements
                  if not one.users) == others
    assert {job: plan.why[job] for job in why} == why
    assert set(plan.why) == set(jobs)

    fleet, warnings = read_back(states, memory=memory)
    idle = {finding.what.split(":")[0] for finding in warnings}
    assert idle == ({f"nodes.{name}" for name in plan.idle} if plan.placements else set())


def test_three_machines_all_work_and_stand_in_for_each_other():
    fleet, warnings = read_back(THREE)
    assert warnings == []
    assert {model.node for model in fleet.models.values()} == {"laptop", "mini", "gpu"}
    assert not any("3b" in model.ollama_model for model in fleet.models.values())
    for model in fleet.models.values():
        heirs = [fleet.models[name] for name in model.fallback]
        assert heirs and all(heir.node != model.node for heir in heirs)
    assert fleet.models["heavy-coder"].fallback == ("second-coder", "small-coder")
    assert sf.plan_tiers(fleet) == {"main": "heavy-coder", "opus": "second-coder",
                                    "sonnet": "heavy-coder", "haiku": "small-coder",
                                    "fable": "heavy-coder"}


def test_a_model_that_stands_alone_has_no_key_that_says_nothing():
    tree = sf.plan_starter((node("laptop", QWEN),)).tree
    assert list(tree["models"]["heavy-coder"]) == [
        "node", "model", "alias", "context", "timeout", "max_parallel"]


def test_one_model_on_two_machines_has_one_alias():
    fleet, warnings = read_back((node("mac1", CODER), node("mac2", CODER)))
    assert warnings == []
    assert {m.alias for m in fleet.models.values()} == {"claude-sonnet-local"}
    assert {m.context for m in fleet.models.values()} == {65536}
    assert list(fleet.models) == ["heavy-coder", "heavy-coder-mac2"]


def test_a_machine_that_would_idle_gets_a_job_or_stands_in():
    states = (node("a", CODER), node("b", DEVSTRAL), node("c", QWEN), node("d", OSS))
    plan = sf.plan_assignment(states)
    assert plan.model("summarizer").node == "d"
    assert plan.why["summarizer"] == "d would idle; this is more than half as strong"
    states = (node("a", model("big:70b")), node("b", model("tiny:4b")), node("c", model("odd:5b")))
    plan = sf.plan_assignment(states)
    (spare,) = [one for one in plan.placements if not one.users]
    assert (spare.model.name, spare.model.node, spare.why) == ("spare-c", "c", "answers when another machine does not")
    assert spare.model.name in plan.model("main session").fallback


@pytest.mark.parametrize("state, why", [
    (node("x"), "it has no model"), (node("x", EMBED, STUB), "none of its models can chat there"),
    (node("x", GEMMA, LIAR), "none of its models is known to call tools"),
    (node("x", model("m:8b", context=4096)), "the contexts of its models are too small")])
def test_why_a_machine_idles_is_said(state, why):
    assert sf.plan_assignment([node("a", CODER), state]).idle == {"x": why}


def test_a_machine_does_not_idle_for_what_the_main_model_lacks_as_well():
    short = model("m:8b", capabilities=("completion",), context=4096)
    assert sf.plan_assignment([node("a", LIAR), node("x", short)]).idle == {
        "x": "the contexts of its models are too small"}


def test_memory_is_kept_to_by_a_smaller_context_or_another_model():
    tight = model("qwen3:14b", 9.3, token_bytes=160_000)  # 10.2 GB, and 10.5 of 65536 tokens
    plan = sf.plan_assignment([node("mac", tight, QWEN)], memory={"mac": 16})
    assert (plan.model("main session").ollama_model, plan.model("main session").context) \
        == ("qwen3:14b", 32768)
    plan = sf.plan_assignment([node("mac", tight, QWEN)], memory={"mac": 12})
    assert plan.model("main session").ollama_model == "qwen3:8b"
    plan = sf.plan_assignment([node("mac", tight)], memory={"mac": 8})
    assert plan.placements == () and plan.flaw == "no model fits the memory of its machine"
    assert plan.idle == {"mac": "its models do not fit its memory"}


def test_what_was_seen_loaded_together_may_be_together():
    both = (CODER, QWEN)
    alone = sf.plan_assignment([node("mac", *both)])
    assert {one.model.ollama_model for one in alone.placements} == {"qwen3-coder:30b"}
    seen = sf.plan_assignment([node("mac", *both, loaded=(("x:70b", 60),))])
    assert {one.model.ollama_model for one in seen.placements} == {"qwen3-coder:30b", "qwen3:8b"}


def test_what_was_measured_beats_what_is_said():
    states = (node("a", LIAR, QWEN),)
    full = sf.Score(6, 6)
    plan = sf.plan_assignment(states, [measured("a", "qwen2.5-coder:32b", tools=full)])
    assert plan.model("main session").ollama_model == "qwen2.5-coder:32b"
    plan = sf.plan_assignment(states, [measured("a", "qwen3:8b", tools=sf.Score(0, 6))])
    assert plan.flaw == "qwen2.5-coder:32b prints tool calls as text"  # nobody calls tools now
    plan = sf.plan_assignment(
        (node("a", CODER), node("b", QWEN)),
        [measured("a", "qwen3-coder:30b", context=sf.Score(1, 3)), measured("b", "qwen3:8b")])
    assert plan.model("main session").context == 32768  # it was cut at 65536
    elsewhere = [measured("b", "qwen2.5-coder:32b", tools=full)]
    assert sf.plan_assignment(states, elsewhere) == sf.plan_assignment(states)


def test_the_fastest_is_the_one_that_was_measured_fastest():
    states = (node("a", CODER), node("b", DEVSTRAL), node("c", QWEN))
    rates = [measured("a", "qwen3-coder:30b", rate=30), measured("b", "devstral:24b", rate=80),
             measured("c", "qwen3:8b", rate=12)]
    plan = sf.plan_assignment(states, rates)
    assert plan.model("planner").ollama_model == "devstral:24b"
    assert sf.plan_assignment(states, rates[:2]).model("planner").ollama_model == "qwen3:8b"


def test_only_the_fastest_is_said_to_be_the_fastest():
    rates = [measured("mac", "qwen3-coder:30b", rate=20.0, tools=sf.Score(5, 5)),
             measured("mac", "qwen3:8b", rate=75.0, tools=sf.Score(5, 5))]
    plan = sf.plan_assignment([node("mac", CODER, QWEN)], rates)  # no memory_gb: one model
    assert {plan.model(job).ollama_model for job in plan.jobs} == {"qwen3-coder:30b"}
    assert plan.why["planner"] == ("the fastest with 7 B parameters or more that fits (qwen3:8b doesn't)")
    assert plan.why["summarizer"] == "the fastest that fits (qwen3:8b doesn't)"
    notes = sf.plan_starter([node("mac", CODER, QWEN)], rates).notes
    assert "the fastest." not in notes["heavy-coder"]
    both = sf.plan_assignment([node("mac", CODER, QWEN)], rates, {"mac": 64})
    assert both.model("summarizer").ollama_model == "qwen3:8b"
    assert both.why["summarizer"] == "the fastest"


def test_only_the_strongest_is_said_to_be_the_strongest():
    big = model("devstral:24b", 14)
    states = [node("mini", CODER), node("gpu", big, QWEN)]
    plan = sf.plan_assignment(states, (), {"gpu": 10})
    assert plan.model("reviewer").ollama_model == "qwen3-coder:30b"  # 8 B are too few beside 30
    states = [node("mini", model("qwen3:14b", 9)), node("gpu", model("gemma9:14b", 9), QWEN)]
    plan = sf.plan_assignment(states, (), {"gpu": 10})
    assert plan.model("reviewer").ollama_model == "qwen3:8b"
    assert plan.why["reviewer"] == "the strongest on another machine that fits (gemma9:14b doesn't)"


def test_what_fits_is_said_of_the_machine_and_not_of_being_small():
    small = [model("coder-large:latest", 0.1), model("shared:latest", 0.1)]
    plan = sf.plan_assignment([node("mini", model("coder-small:latest", 0.1)), node("studio", *small)])
    assert plan.why["summarizer"].startswith("a small model, the fastest off the main session's machine")


def test_a_mixture_is_as_fast_as_what_is_at_work_in_it():
    states = (node("a", model("big:70b")), node("b", model("mix:30b-a3b"), QWEN))
    assert sf.plan_assignment(states).model("planner").ollama_model == "mix:30b-a3b"


@pytest.mark.parametrize("first, second", [
    (model("x-coder:30b"), model("x:32b")), (model("x:8b"), model("y:8b", capabilities=THINKS)),
    (model("x:8x7b"), model("x:40b")), (model("x", parameters="9.0B"), model("x:8b")),
    (model("x", 20), model("x", 10))])
def test_strength_is_parameters_then_coders_then_who_does_not_think(first, second):
    strengths = [sf.plan_strength(one, sf.plan_size(one)) for one in (first, second)]
    assert strengths[0] > strengths[1]


# -- what holds for every fleet --

SIZES = (1, 3, 4, 7, 8, 14, 20, 24, 30, 32, 70)
CAPABILITIES = (TOOLS, TOOLS, THINKS, (*TOOLS, "vision"), ("completion",), ("embedding",), None)


def random_fleet(seed):
    chance = random.Random(seed)
    makers = [f"{maker}{chance.choice(['', '-coder'])}" for maker in ("qwen3", "llama", "gemma", "mix")]
    catalogue = []
    for _ in range(chance.randint(1, 12)):
        size = chance.choice(SIZES)
        catalogue.append(model(
            f"{chance.choice(makers)}:{size}b", size * 0.6, chance.choice(CAPABILITIES),
            chance.choice((None, 2048, 8192, 16384, 32768, 40960, 131072)),
            token_bytes=chance.choice((None, 50_000, 200_000)),
            remote=chance.choice(("", "", "", "", "ollama.com"))))
    catalogue = list({one.name: one for one in catalogue}.values())
    states, memory = [], {}
    for number in range(chance.randint(1, 9)):
        have = chance.sample(catalogue, chance.randint(0, len(catalogue)))
        reason = chance.choice(("", "", "", "", "timeout"))
        loaded = (("x", chance.choice((0, 30, 90))),)
        states.append(node(f"n{number}", *([] if reason else have), loaded=loaded, reason=reason))
        if chance.random() < 0.5:
            memory[f"n{number}"] = chance.choice((4, 8, 16, 32, 64, 128))
    return states, memory


def fits_alone(state, one, memory, least):
    gigabytes = memory.get(state.name)
    return gigabytes is None or sf.plan_gigabytes(one, least) <= gigabytes


def who_could(states, memory, job):
    """Who calls tools, holds the job's context and fits a machine that has nothing else."""
    able = []
    for state in states:
        for one in state.models:
            candidate = sf.plan_candidate(state.name, one)
            if candidate.calls_tools and candidate.holds(sf.JOBS[job]) \
                    and fits_alone(state, one, memory, sf.JOBS[job]):
                able.append(candidate)
    return able


def check_promises(states, memory):
    plan = sf.plan_assignment(states, memory=memory)
    held = {(load.model.node, load.model.ollama_model): load.held for load in plan.placements}
    models = [load.model for load in plan.placements]
    assert plan == sf.plan_assignment(list(states), memory=dict(memory))

    # Every role is served where any model fits it.
    if who_could(states, memory, "main session"):
        assert set(plan.jobs) == set(sf.JOBS)
        for job, least in sf.JOBS.items():
            one = plan.model(job)
            assert sf.plan_candidate(one.node, held[one.node, one.ollama_model]).calls_tools and one.context >= least

    # No machine is over its memory, and none holds two of which nobody knows that they fit.
    for state in states:
        here = [load for load in plan.placements if load.model.node == state.name]
        need = sum(sf.plan_gigabytes(load.held, load.model.context) for load in here)
        if state.name in memory:
            assert need <= memory[state.name]
        elif len(here) > 1:
            assert need <= sum(loaded.size for loaded in state.loaded) / 1e9
        assert len({load.model.ollama_model for load in here}) == len(here)

    # No machine idles while a job could move to it at less than half its strength lost.
    busy = {one.node for one in models}
    for job in plan.jobs:
        now = plan.model(job)
        strength = sf.plan_candidate(now.node, held[now.node, now.ollama_model]).strength
        crowd = [other for other in plan.jobs if plan.model(other).node == now.node]
        if job == "main session" or len(crowd) < 2 or not who_could(states, memory, "main session"):
            continue
        for candidate in who_could(states, memory, job):
            assert candidate.node in busy or candidate.strength * 2 <= strength, (job, candidate)

    for one in models:
        heirs = [other for name in one.fallback for other in models if other.name == name]
        assert len(heirs) == len(one.fallback)
        assert all(heir.node != one.node and heir.alias != one.alias for heir in heirs)
    assert len({one.name for one in models}) == len(models)


@pytest.mark.parametrize("start", range(0, 1000, 100))
def test_what_is_promised_holds_for_random_fleets(start):
    for seed in range(start, start + 100):
        states, memory = random_fleet(seed)
        check_promises(states, memory)
        fleet, warnings = read_back(states, memory=memory)
        slugs = {finding.slug for finding in warnings}
        usual = {"unused-node", "small-context", "prints-tool-calls"}
        if not sf.plan_assignment(states, memory=memory).placements:  # placeholders fit by chance
            usual |= {"model-too-large", "memory-short"}
        assert slugs <= usual, (seed, warnings)


def test_who_does_what_is_said_in_a_table_and_three_sentences():
    states = [*THREE, node("box", EMBED)]
    said = sf.format_starter(sf.plan_starter(states), states)
    assert said == """\
  laptop (http://laptop:11434): 2 models
  mini (http://mini:11434): 3 models
  gpu (http://gpu:11434): 2 models
  box (http://box:11434): 1 model

Role          Model            Machine  Why
main session  qwen3-coder:30b  mini     the strongest: 30.5 B, a coder
implementer   qwen3-coder:30b  mini     the strongest: 30.5 B, a coder
reviewer      devstral:24b     gpu      the strongest on another machine, of another family
planner       qwen3:8b         laptop   the fastest with 7 B parameters or more
summarizer    qwen3:8b         laptop   the fastest off the main session's machine
If a machine doesn't answer, another takes over: mini → gpu, laptop; gpu → mini, laptop; \
laptop → mini, gpu.
box idles: none of its models can chat there.
mini and gpu: without `memory_gb:` a machine gets only one model. Add it, then run \
`subagent-fleet recommend`.
"""


def steps_of(machines):
    """How many functions a plan calls: no other program on the machine makes it more."""
    states = [sf.NodeState(f"m{number:03}", f"http://m{number}:11434", models=tuple(
        sf.NodeModel(f"maker-{other}:{other % 40 + 1}b", (other % 40 + 1) * 6 * 10**8,
                     capabilities=("completion", "tools"), trained_context=131072)
        for other in range(50))) for number in range(machines)]
    steps = 0

    def count(frame, event, what):
        nonlocal steps
        steps += event == "call"

    sys.setprofile(count)
    try:
        sf.plan_assignment(states)
    finally:
        sys.setprofile(None)
    return steps


def test_twice_as_many_machines_take_twice_as_many_steps():
    few, many = steps_of(50), steps_of(100)
    assert 10_000 < few < many < 2.2 * few
