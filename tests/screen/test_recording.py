"""A recording: its contents, what it omits, and that the scheduler reproduces its plans."""

import hashlib
import json
from dataclasses import replace

import pytest
from screen_stage import Stage

import tui
from docs.make import page
from engine.snapshot import Limits, Metrics, RequestView, StepView
from nanobatch import SamplingParams
from policies import POLICIES
from screen import export_recording as record
from screen.state import prompt_of
from web import simulate

PRICE = {"step": 0.01, "row": 0.0, "token": 0.001}
ABOUT = {"command": "python tui.py", "model": "words"}


def ids_of(stage: Stage) -> record.Ids:
    return lambda request: stage.engine.text.ask(prompt_of(request))


def recorded(stage: Stage) -> dict:
    """Return the recording as a reader of the file sees it."""
    recording = record.record(stage.state, ABOUT, ids_of(stage))
    return json.loads(record.as_text(recording))


def steps_of(recording: dict, run: int = 0) -> list[dict]:
    names = recording["fields"]["StepView"]
    return [simulate.named(names, step) for step in recording["runs"][run]["steps"]]


def requests_of(recording: dict, run: int = 0) -> list[dict]:
    names = recording["fields"]["RequestView"]
    return [simulate.named(names, each) for each in recording["runs"][run]["requests"]]


def test_a_recording_has_every_step_and_text():
    stage = Stage(policy="static").load()
    stage.obey("/burst 12")
    stage.finish()
    recording = recorded(stage)
    names = {"StepView": StepView, "RequestView": RequestView, "Metrics": Metrics}
    assert all(recording["fields"][n] == list(k.__annotations__) for n, k in names.items())
    assert recording["fields"]["Limits"] == list(Limits._fields)
    steps = steps_of(recording)
    assert len(steps) == len(stage.state.history) > 100
    for step, column in zip(steps, stage.state.history, strict=True):
        assert [s for s, *_ in step["decode"]] == [s for s, _ in column.view.decode]
        assert step["waiting"] == column.view.waiting
    requests = requests_of(recording)
    assert len(requests) == 12
    for request, known in zip(requests, stage.state.requests.values(), strict=True):
        assert request["text"] == known.text and request["prompt"] == prompt_of(known)
    hashes = [hashlib.sha256(r.text.encode()).hexdigest()[:16] for r in stage.state.ended]
    assert sorted(hashes) == sorted(recording["runs"][0]["hashes"])


def test_a_race_is_recorded_as_two_runs(stage):
    stage.obey("/burst 3")
    stage.finish()
    stage.obey("/race 12")
    recording = recorded(stage.finish())
    static, continuous = recording["runs"]
    assert (static["policy"], continuous["policy"]) == ("static", "continuous")
    assert static["hashes"] == continuous["hashes"] and len(static["hashes"]) == 12
    for run in range(2):
        assert [r["id"] for r in requests_of(recording, run)] == list(range(1, 13))
        assert [step["step"] for step in steps_of(recording, run)][:3] == [1, 2, 3]
    assert static["clock"][-1][1] > continuous["clock"][-1][1]
    stage.obey("/burst 5")
    (run,) = recorded(stage.finish())["runs"]
    assert len(run["requests"]) == 5


@pytest.mark.parametrize(("policy", "is_hurried"), [("continuous", True), ("static", False)])
def test_the_scheduler_plans_again_what_was_recorded(policy, is_hurried):
    """The scheduler reproduces each recorded plan from the limits and requests in the recording."""
    stage = Stage(policy=policy).load()
    stage.engine.eager_first_token = is_hurried
    stage.engine.sched.budget = 70
    stage.obey("/burst 20")
    recording = recorded(stage.finish())
    run = recording["runs"][0]
    limits = simulate.named(recording["fields"]["Limits"], run["limits"])
    prompts = simulate.sent_of(run, recording["fields"])
    played = simulate.play(limits, POLICIES[policy], prompts, page.price_of(recording))
    plans = json.loads(json.dumps(played["steps"]))
    assert len(plans) > 100
    for plan, step in zip(plans, steps_of(recording), strict=True):
        assert plan == {name: step[name] for name in plan}


def test_a_recording_names_no_client_and_tells_no_error(stage):
    """Error messages and clients are replaced, because a message may contain a path, and a client's origin is
    its address."""
    ids = stage.engine.text.ask("words")
    stage.engine.submit(ids, SamplingParams(max_tokens=9), origin="10.9.8.7", client="10.9.8.7")
    stage.obey("/burst 2")
    stage.turns(2)
    failed = next(iter(stage.state.requests.values()))
    stage.state.requests[failed.id] = replace(failed, error="/home/ada: no such file")
    recording = recorded(stage)
    told = json.dumps(recording)
    assert "10.9.8.7" not in told and "/home/ada" not in told
    assert requests_of(recording)[0]["error"] == "error"
    assert [r["client"] for r in requests_of(recording)] == ["client 1", "", ""]


def test_a_recording_of_fair_still_knows_who_is_who():
    """Clients are recorded as numbers, because `fair` needs to know which requests have the same client."""
    stage = Stage(policy="fair", slots=2).load()
    for number in range(12):
        ids = stage.engine.text.ask(f"prompt {number}")
        stage.engine.submit(ids, SamplingParams(max_tokens=9), client="ab"[number in (7, 9)])
    recording = recorded(stage.finish())
    run = recording["runs"][0]
    limits = simulate.named(recording["fields"]["Limits"], run["limits"])
    prompts = simulate.sent_of(run, recording["fields"])
    prompts = [sent._replace(prompt=(i,) * len(sent.prompt)) for i, sent in enumerate(prompts)]
    played = simulate.play(limits, POLICIES["fair"], prompts, PRICE)
    admitted = [r for step in played["steps"] for _, r in step["admitted"]]
    assert admitted == [r for step in steps_of(recording) for _, r in step["admitted"]]
    assert admitted != sorted(admitted)


def test_a_recording_is_bounded(stage, monkeypatch):
    monkeypatch.setattr(record, "STEPS", 50)
    monkeypatch.setattr(record, "REQUESTS", 4)
    monkeypatch.setattr(record, "LETTERS", 30)
    stage.obey("/burst 12")
    recording = recorded(stage.finish())
    run = recording["runs"][0]
    assert len(run["steps"]) == len(run["clock"]) == 50
    assert len(run["requests"]) == len(run["hashes"]) == len(run["ids"]) == 4
    texts = [text for r in requests_of(recording) for text in (r["prompt"], r["text"])]
    assert max(map(len, texts)) == 30


def test_the_contents_of_a_recording_are_announced(stage, capsys, tmp_path):
    stage.obey("/burst 3")
    stage.finish()
    file = tmp_path / "run.json"
    args = tui.parse_arguments(["--record", str(file)])
    assert not file.exists(), "it would be empty, if the program ended in the middle"
    assert tui.write_files(args, stage.session, "")
    assert "1 run (continuous), 3 prompts and their answers" in capsys.readouterr().err
    assert len(json.loads(file.read_text())["runs"]) == 1
    assert "word for word" in record.HOLDS and record.HOLDS in tui.options().format_help().replace(
        "\n" + " " * 24, " "
    )


def test_recording_nothing_is_a_failure(capsys, tmp_path):
    """Regression: the exit code was 0 although nothing had been recorded."""
    file = tmp_path / "run.json"
    file.write_text("an earlier one")
    args = tui.parse_arguments(["--record", str(file)])
    assert not tui.write_files(args, Stage().load().session, "")
    assert "nothing has run" in capsys.readouterr().err
    assert file.read_text() == "an earlier one"


def test_a_recordings_command_has_no_folder_and_no_key(tmp_path):
    folder = tmp_path / "a" / "model"
    folder.mkdir(parents=True)
    options = ["--model", str(folder), "--seed", "3", "--api-key", "hush", "--script", "race12"]
    command = tui.command_of(tui.parse_arguments(options))
    assert command == "python tui.py --model model --seed 3 --script race12 --record run.json"
    watching = tui.command_of(
        tui.parse_arguments(["--watch", "http://10.9.8.7:80", "--key", "eye"])
    )
    assert watching == "python tui.py --watch URL --record run.json"
