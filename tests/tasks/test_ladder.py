"""Which models may do a task, where it starts, and when it moves up."""
import heapq
import random

import pytest

import subagent_fleet as sf

FLEET_TEXT = """\
project: {name: x, claude: {main: strong}}
nodes:
  one: {endpoint: "http://192.168.1.5:11434"}
  two: {endpoint: "http://192.168.1.6:11434"}
  far: {endpoint: "https://api.example.com", provider: openai, api_key_env: FAR_API_KEY}
models:
  strong: {node: one, ollama_model: "qwen3-coder:30b", alias: strong-local, context: 65536}
  middle: {node: two, ollama_model: "qwen3:14b", alias: middle-local, context: 65536}
  weak: {node: two, ollama_model: "qwen3:8b", alias: weak-local, context: 32768}
  short: {node: two, ollama_model: "qwen3:32b", alias: short-local, context: 8192}
  mute: {node: two, ollama_model: "gemma3:27b", alias: mute-local, context: 65536}
  cloud: {node: one, ollama_model: "glm-5:cloud", alias: cloud-one, context: 65536, cloud: true}
  far: {node: far, model: big, alias: far-one, context: 65536}
agents: {implementer: {model: middle, description: Writes.}}
"""
FLEET, _problems = sf.check_fleet(sf.Document(FLEET_TEXT, "fleet.yaml"))
assert FLEET, _problems


def state_of(*, state="waiting", rung="", climbed=(), open=False, **task):
    task = {name: tuple(value) if isinstance(value, list) else value
            for name, value in task.items()}
    return sf.change(sf.TaskState("t", sf.TaskSpec("t", prompt="x", **task), 0), state=state,
                     rung=rung, climbed=climbed, open=open, base="a" * 40)


@pytest.mark.parametrize("task, rungs", [
    ({"agent": "implementer", "check": "true"}, ("middle-local",)),
    ({"model": "weak", "check": "true"}, ("weak-local",)),
    ({}, ("strong-local",)),
    # All at home that call tools and hold the context, the strongest first.
    ({"check": "true"}, ("strong-local", "middle-local", "weak-local")),
    ({"check": "true", "coder": "codex"}, ("strong-local",)),
    ({"check": "true", "coder": ["sh", "-c", "true"]}, ("",)),
    # What leaves the house is no place to start as long as there is one at home.
    ({"models": ["weak", "strong-local", "cloud", "login"]}, ("weak-local", "strong-local")),
    ({"models": ["far", "weak"]}, ("weak-local",)),
    ({"models": ["cloud", "login"]}, ("cloud-one",))])
def test_where_a_task_may_start(task, rungs):
    assert sf.plan_rungs(state_of(**task), FLEET) == rungs


def test_without_a_fleet_models_are_those_of_the_login():
    assert sf.plan_rungs(state_of(check="true"), None) == ("",)
    assert sf.plan_rungs(state_of(models=["haiku", "opus"]), None) == ("haiku",)


@pytest.mark.parametrize("task, climbed, rungs", [
    ({"check": "true"}, ("weak-local",), ("strong-local", "middle-local")),
    ({"check": "true"}, ("middle-local",), ("strong-local",)),
    ({"models": ["weak", "strong", "login"]}, ("weak-local",), ("strong-local",)),
    # It began on the second, the first being busy: it does not go down again.
    ({"models": ["weak", "strong", "login"]}, ("strong-local",), ("login",)),
    ({"models": ["weak", "strong"]}, ("weak-local", "strong-local"), ("strong-local",))])
def test_what_has_failed_moves_up_and_never_down(task, climbed, rungs):
    assert sf.plan_rungs(state_of(climbed=climbed, **task), FLEET) == rungs


def test_a_try_that_goes_on_stays_on_its_rung():
    state = state_of(check="true", rung="weak-local", open=True)
    assert sf.plan_rungs(state, FLEET) == ("weak-local",)


def climb(cause, to="waiting", *, away_left=3, rung="weak-local", task=None, **state):
    ruling = sf.Ruling(to, "why", cause=cause)
    state = state_of(rung=rung, **(task or {"models": ["weak", "strong", "login"]}), **state)
    return sf.plan_climb(state, ruling, FLEET, away_left=away_left)


@pytest.mark.parametrize("cause, to, climbs", [
    ("check", "waiting", True), ("check", "failed", True), ("diff", "waiting", True),
    ("stalled", "waiting", False),  # once: the same session goes on
    ("stalled", "failed", True), ("too-large", "parked", True), ("deadline", "failed", True),
    ("api", "waiting", False), ("scope", "parked", False), ("setup-failed", "parked", False),
    ("lost", "parked", False), ("", "done", False), ("", "stopped", False)])
def test_a_task_moves_up_for_what_another_model_may_do_better(cause, to, climbs):
    ruling = climb(cause, to)
    assert (ruling.climbs == "weak-local", ruling.to) == (climbs, "waiting" if climbs else to)
    assert not ruling.leaves


def test_at_the_top_it_stays_what_it_was():
    assert climb("check", "failed", rung="login").to == "failed"
    assert climb("check", "failed", rung="strong-local", task={"check": "true"}).climbs == ""


def test_few_tasks_a_day_leave_the_house():
    up = climb("check", "failed", rung="strong-local")
    assert (up.climbs, up.leaves) == ("strong-local", True)
    stays = climb("check", "failed", rung="strong-local", away_left=0)
    assert (stays.to, stays.reason) == ("failed", "why; `cloud_limit` keeps it off login today")
    # From one cloud to another it does not leave the house again.
    task = {"models": ["cloud", "login"]}
    assert climb("check", "failed", rung="cloud-one", away_left=0, task=task).to == "waiting"


def test_the_end_of_a_run_says_where_tasks_were_done():
    done = [(False, "small")] * 17 + [(True, "studio")] * 2 + [(True, "login")]
    assert sf.describe_homes(done, 20) == \
        "17 of 20 done at home, 2 after moving up to studio, 1 by your login."


# -- a fleet of three machines, on a clock of its own --

ABILITY = {"strong-local": 0.9, "middle-local": 0.6, "weak-local": 0.3}


def simulate(seed, slots, rounds=3):
    """Work on thirty tasks; return how many are done, and after how many turns.

    A turn passes its check with the ability of its machine's model. As in a run, a failed
    check goes back `rounds` times; then the task moves up, or is tried a second time.
    """
    luck = random.Random(seed)
    states = {}
    for number in range(30):
        task = sf.TaskSpec(f"t{number}", prompt="x", check="true", rounds=rounds)
        states[task.name] = sf.TaskState(
            task.name, task, number, place=sf.Workplace(base="a" * 40))
    clock, working = 0, []
    while True:
        limits = sf.Limits(slots, 99, rungs={
            name: sf.plan_rungs(state, FLEET) for name, state in states.items()},
            resting={alias: "is off" for alias in ABILITY if alias not in slots})
        for name, rung in sf.plan_starts(states, limits, clock).items():
            states[name] = sf.change(states[name], state="running", rung=rung, open=True)
            heapq.heappush(working, (clock + 1, name))
        if not working:
            return sum(state.state == "done" for state in states.values()), clock
        clock, name = heapq.heappop(working)
        state = states[name]
        if luck.random() < ABILITY[state.attempt.rung]:
            states[name] = sf.replace(state, state="done")
        elif state.attempt.round < rounds:
            states[name] = sf.change(state, round=state.attempt.round + 1)
            heapq.heappush(working, (clock + 1, name))
        else:
            ruling = sf.plan_climb(state, sf.after_failure(state, "why", "check"), FLEET,
                                   away_left=0)
            climbed = (*state.attempt.climbed, ruling.climbs) if ruling.climbs else state.attempt.climbed
            failures = 0 if ruling.climbs else state.attempt.failures + 1
            states[name] = sf.change(
                state, state=ruling.to, climbed=climbed, failures=failures, round=0, open=False,
                rung="" if ruling.climbs else state.attempt.rung)


def test_three_machines_of_different_ability_do_all_in_little_more_than_half_the_time():
    everywhere, alone = 0, 0
    for seed in range(40):
        done, turns = simulate(seed, dict.fromkeys(ABILITY, 1))
        assert done == 30, seed
        everywhere += turns
        alone += simulate(seed, {"strong-local": 1})[1]
    assert everywhere / alone <= 0.6, everywhere / alone


# -- a task file to start from --

@pytest.mark.parametrize("files, kind, setup, check", [
    ({"pyproject.toml": "pytest", "uv.lock": ""}, "Python", ("uv sync",), "uv run python -m pytest -q"),
    ({"pyproject.toml": "pytest", "poetry.lock": ""}, "Python", ("poetry install",),
     "poetry run python -m pytest -q"),
    ({"setup.py": ""}, "Python", (), "python3 -m unittest -q"),
    ({"requirements.txt": "pytest"}, "Python",
     ("python3 -m venv .venv", ".venv/bin/pip install -q -r requirements.txt"),
     ".venv/bin/python -m pytest -q"),
    ({"package.json": '{"scripts": {"test": "vitest"}}', "pnpm-lock.yaml": ""}, "Node",
     ("pnpm install --frozen-lockfile",), "pnpm test"),
    ({"package.json": '{"scripts": {"test": "echo \\"Error: no test specified\\"", "build": "tsc"}}',
      "package-lock.json": ""}, "Node", ("npm ci",), "npm run build"),
    ({"package.json": "not json"}, "Node", ("npm install",), ""),
    ({"Gemfile": 'gem "rails"', "package.json": "{}"}, "Rails", ("bundle install",), "bin/rails test"),
    ({"Gemfile": "gem 'rails'", "spec": ""}, "Rails", ("bundle install",), "bundle exec rspec"),
    ({"go.mod": ""}, "Go", (), "go vet ./... && go test ./..."),
    ({"Cargo.toml": ""}, "Rust", (), "cargo test --quiet"),
    ({"Makefile": "all:\n\ntest: all\n"}, "make", (), "make test"),
    ({"pom.xml": ""}, "Maven", (), "mvn -q test"), ({"mix.exs": "", "Makefile": "test:\n"}, "Elixir", (), "mix test"),
    ({"tox.ini": "deps = pytest"}, "Python", (), "python3 -m pytest -q"),
    ({"test_calc.py": ""}, "Python", (), "python3 -m unittest -q"),
    ({"Makefile": "test := 1\n"}, "", (), ""), ({}, "", (), "")])
def test_what_a_project_is_set_up_and_checked_with_is_guessed(files, kind, setup, check):
    guess = sf.guess_project(files)
    assert (guess.kind, guess.setup, guess.check) == (kind, setup, check)
    plan, problems = sf.check_tasks(sf.Document(sf.render_tasks(guess), "tasks.yaml"))
    assert not problems
    assert all((task.setup, task.check) == (setup, check or None) for task in plan.tasks.values())
    assert all(word in sf.describe_guess(guess) for word in (*setup, check))


def test_twins_of_a_list_have_a_model_each():
    plan, problems = sf.check_tasks(sf.Document(
        "defaults: {agent: implementer}\ntasks:\n  t: {prompt: x, times: [weak, login]}\n", "tasks.yaml"), FLEET)
    assert not problems
    assert {name: (task.models, task.agent, task.group) for name, task in plan.tasks.items()} == {
        "t-a": (("weak",), None, "t"), "t-b": (("login",), None, "t")}
    _, problems = sf.check_tasks(sf.Document("tasks:\n  t: {prompt: x, times: [weka]}\n", "tasks.yaml"), FLEET)
    assert problems[0].where == "tasks.yaml:2:26" and problems[0].fix == "did you mean `weak`?"
