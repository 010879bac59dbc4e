import inspect
import json
import os
import pty
import re
import shlex
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from wandb_server import WandbServer

from runner.errors import BadInput
from runner.trackers import Tracker, Wandb

CONF = Path(__file__).parents[1] / "conf" / "tracker"
KEY = "5ec2e7" * 6 + "beef"  # forty characters, as W&B wants them
LEVERS = {"data.loader.num_workers": 4, "precision": "bf16"}
CONFIG = {"seed": 0, "model": {"width": 16}, "clip_grad_norm": None}
SUMMARY = {
    "schema": 1,
    "status": "ok",
    "speed": {"steps": 18, "step_ms": {"median": 9.5, "ci95": [9.0, 10.0]}, "tokens_per_s": None},
    "phases_ms": {"data": 2.5, "forward": None},
    "memory": {"peak_rss_mib": 800.25},
    "utilisation": {"cpu_util_pct": 61.5, "throttled": False, "mfu_pct": None},
    "quality": {"loss": 0.25, "val/accuracy": 0.875},
    "environment": {"python": "3"},
}
FIGURES = {
    "speed/steps": 18,
    "speed/step_ms/median": 9.5,
    "speed/step_ms/ci95/0": 9.0,
    "speed/step_ms/ci95/1": 10.0,
    "phases_ms/data": 2.5,
    "memory/peak_rss_mib": 800.25,
    "utilisation/cpu_util_pct": 61.5,
    "quality/loss": 0.25,
    "quality/val/accuracy": 0.875,
}


def step_row(step, **columns):
    row = {"step": step, "epoch": 0, "is_warmup": step < 2, "samples": 64, "tokens": None, "loss": 2.0 - step / 100}
    row |= {"lr": 0.1, "grad_norm": None, "loss_scale": None, "skipped": False, "step_ms": 10.5, "delay_ms": None}
    row |= {"data_ms": 2.5, "forward_ms": 4.0, "other_ms": 0.25, "gc_ms": 0.0, "rss_mib": 512.0, "allocated_mib": None}
    return row | columns


def charted(step):
    """What of `step_row` a tracker must show, and under which names."""
    return {
        "step": step,
        "train/epoch": 0,
        "train/samples": 64,
        "train/loss": 2.0 - step / 100,
        "train/lr": 0.1,
        "speed/step_ms": 10.5,
        "phases/data_ms": 2.5,
        "phases/forward_ms": 4.0,
        "phases/other_ms": 0.25,
        "speed/gc_ms": 0.0,
        "memory/rss_mib": 512.0,
    }


def evaluation_row(step, accuracy=0.5):
    metrics = {"val/loss": 1.5, "val/accuracy": accuracy}
    return {"step": step, "epoch": 1, "metrics": metrics, "num_samples": 2000, "eval_s": 0.75}


def own(row):
    """A history row without the client's own columns."""
    return {key: value for key, value in row.items() if not key.startswith("_")}


def tracker(**changes):
    options = yaml.safe_load((CONF / "wandb.yaml").read_text())
    del options["_target_"]
    return Wandb(**options | {"init_timeout_s": 3, "finish_timeout_s": 5} | changes)


def begin(tracker, directory, run_id="run-1", **run):
    directory.mkdir(exist_ok=True)
    return tracker.start(directory=directory, run={"id": run_id, **run}, levers=LEVERS, config=CONFIG)


def record(tracker, directory, run_id="run-1", summary=SUMMARY, num_steps=20, **run):
    """A whole run; returns both sentences."""
    opening = begin(tracker, directory, run_id, **run)
    for step in range(num_steps):
        tracker.log_step(step_row(step))
    tracker.log_evaluation(evaluation_row(step=5))
    return opening, tracker.finish(summary)


def read_back(directory):
    """The one .wandb file below a directory: LevelDB's log format around W&B's own messages."""
    from wandb.proto import wandb_internal_pb2 as messages

    (path,) = directory.glob("wandb/offline-run-*/*.wandb")
    data, position, pending = path.read_bytes(), 7, b""
    stored = {"config": {}, "history": [], "summary": {}, "metrics": {}, "exit": None, "kinds": set(), "run": None}
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        pending += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            message = messages.Record()
            message.ParseFromString(pending)
            pending = b""
            _store(stored, message)
    return stored


def _store(stored, message):
    kind = message.WhichOneof("record_type")
    stored["kinds"].add(kind)

    def items(of):
        return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in of}

    if kind == "run":
        stored["run"] = message.run
        stored["config"] |= items(message.run.config.update)
    elif kind == "history":
        stored["history"].append(items(message.history.item))
    elif kind == "summary":
        stored["summary"] |= items(message.summary.update)
    elif kind == "metric":
        stored["metrics"][message.metric.glob_name or message.metric.name] = message.metric.step_metric
    elif kind == "exit":
        stored["exit"] = message.exit.exit_code


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Nothing of the developer's W&B is read or written, and no host but this one can be reached."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    places = {
        "HOME": home,
        "NETRC": home / ".netrc",
        "XDG_CACHE_HOME": home / ".cache",
        "XDG_CONFIG_HOME": home / ".config",
    }
    places |= {f"WANDB_{kind}_DIR": home / kind for kind in ("CACHE", "CONFIG", "DATA", "ARTIFACT")}
    places |= {"WANDB_DIR": home / "elsewhere"}
    for name, place in places.items():
        monkeypatch.setenv(name, str(place))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "x")  # so that what the code sets is undone
    monkeypatch.delenv("WANDB_ERROR_REPORTING")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.chdir(home)
    yield
    if hasattr(sys.modules.get("wandb"), "teardown"):
        sys.modules["wandb"].teardown()


@pytest.fixture
def server(monkeypatch):
    """A backend that answers, with somebody logged in to it."""
    with WandbServer() as backend:
        monkeypatch.setenv("WANDB_BASE_URL", backend.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield backend


def test_a_tracker_that_is_off_does_nothing(tmp_path):
    assert record(Tracker(), tmp_path / "run") == (None, None)
    assert list((tmp_path / "run").iterdir()) == []


def test_the_menu_offers_each_tracker_with_all_its_arguments():
    menu = {path.stem: yaml.safe_load(path.read_text()) for path in CONF.glob("*.yaml")}
    assert {name: options.pop("_target_") for name, options in menu.items()} == {
        "none": "runner.trackers.Tracker",
        "wandb": "runner.trackers.Wandb",
    }
    assert menu["none"] == {}
    assert menu["wandb"].keys() == inspect.signature(Wandb).parameters.keys()
    Wandb(**menu["wandb"])


def test_an_offline_run_can_be_read_back(tmp_path):
    opening, closing = record(tracker(mode="offline", tags=["a", "b"]), tmp_path / "run", "run-7")
    stored = read_back(tmp_path / "run")
    assert stored["run"].run_id == stored["run"].display_name == "run-7"
    assert (stored["run"].project, list(stored["run"].tags)) == ("runner", ["a", "b"])
    assert stored["config"]["levers"] == LEVERS
    assert stored["config"]["config"] == CONFIG
    assert [own(row) for row in stored["history"][:-1]] == [charted(step) for step in range(20)]
    assert stored["exit"] == 0
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert "offline" in opening
    assert f"wandb sync {folder}`" in opening
    assert f"wandb sync {folder}`" in closing


def test_an_evaluation_that_comes_late_is_kept_at_its_own_step(tmp_path):
    record(tracker(mode="offline"), tmp_path / "run")
    stored = read_back(tmp_path / "run")
    expected = {"step": 5, "val/loss": 1.5, "val/accuracy": 0.5, "val/num_samples": 2000, "val/eval_s": 0.75}
    assert own(stored["history"][-1]) == expected
    for chart in ("train", "val", "speed", "phases", "memory"):
        assert stored["metrics"][f"{chart}/*"] == "step"


def test_the_sentence_of_an_offline_run_uploads_it(tmp_path, server):
    _, closing = record(tracker(mode="offline"), tmp_path / "a run")
    assert server.num_requests == 0
    sync(closing)
    assert [own(row) for row in server.runs["run-1"].history[:-1]] == [charted(step) for step in range(20)]
    assert server.runs["run-1"].exit_code == 0


def sync(sentence):
    command = shlex.split(re.search(r"`(wandb sync .*?)`", sentence)[1])
    path = Path(sys.executable).parent / command[0]
    subprocess.run([path, *command[1:]], check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)


def test_an_online_run_reaches_the_server_whole(tmp_path, server):
    opening, closing = record(tracker(tags=["x"]), tmp_path / "run", sweep=None)
    run = server.runs["run-1"]
    assert server.url in opening
    assert closing is None
    assert (run.display_name, run.group, run.tags, run.project) == ("run-1", None, ["x"], "runner")
    assert run.config["levers"]["value"] == LEVERS
    assert run.config["config"]["value"] == CONFIG
    assert [own(row) for row in run.history[:-1]] == [charted(step) for step in range(20)]
    assert run.rows("val/accuracy")[0]["step"] == 5
    assert run.exit_code == 0
    assert server.unknown == []


def test_the_summary_has_the_figures_and_no_nulls(tmp_path, server):
    record(tracker(), tmp_path / "run")
    summary = server.runs["run-1"].summary
    sections = ("speed/", "phases_ms/", "memory/", "utilisation/", "quality/", "phases/", "environment")
    assert {key: value for key, value in summary.items() if key.startswith(sections)} == FIGURES
    assert summary["train/loss"] == pytest.approx(2.0 - 19 / 100)


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("failed", 1), ("oom", 3), ("interrupted", 1), ("new", 1)])
def test_the_exit_code_tells_how_the_run_ended(tmp_path, status, code):
    record(tracker(mode="offline"), tmp_path / "run", summary={"status": status}, num_steps=1)
    assert read_back(tmp_path / "run")["exit"] == code


def test_only_finite_numbers_are_sent(tmp_path):
    watch = tracker(mode="offline")
    begin(watch, tmp_path / "run")
    watch.log_step(step_row(0, loss=float("nan"), lr=float("inf"), note="text", extra=[1]))
    watch.log_step(dict.fromkeys(step_row(1)) | {"step": 1})
    watch.log_evaluation(evaluation_row(1, accuracy=None))
    watch.finish({"status": "ok", "quality": {"loss": float("inf")}})
    stored = read_back(tmp_path / "run")
    expected = {key: value for key, value in charted(0).items() if key not in ("train/loss", "train/lr")}
    assert [own(row) for row in stored["history"]][:2] == [expected, {"step": 1}]
    assert "val/accuracy" not in stored["history"][2]
    assert "quality/loss" not in stored["summary"]


def test_the_jobs_of_a_sweep_are_runs_of_one_group(tmp_path, server):
    first, second = tracker(), tracker()
    begin(first, tmp_path / "0", "job-0", sweep="2026-01-01")
    first.log_step(step_row(0))
    first.finish({"status": "failed"})
    begin(second, tmp_path / "1", "job-1", sweep="2026-01-01")
    second.log_step(step_row(0, loss=7.0))
    second.finish(SUMMARY)
    assert {name: (run.group, run.exit_code) for name, run in server.runs.items()} == {
        "job-0": ("2026-01-01", 1),
        "job-1": ("2026-01-01", 0),
    }
    assert [run.history[0]["train/loss"] for run in server.runs.values()] == [2.0, 7.0]


def test_a_run_that_was_never_finished_is_not_handed_to_the_next(tmp_path, server):
    begin(tracker(), tmp_path / "0", "job-0")
    record(tracker(), tmp_path / "1", "job-1", num_steps=3)
    assert len(server.runs["job-1"].rows("train/loss")) == 3


def test_one_tracker_can_record_one_run_after_the_other(tmp_path, server):
    watch = tracker(group="mine")
    for run_id in ("job-0", "job-1"):
        record(watch, tmp_path / run_id, run_id, num_steps=2, sweep="theirs")
    assert {name: (run.group, len(run.rows("train/loss"))) for name, run in server.runs.items()} == {
        "job-0": ("mine", 2),
        "job-1": ("mine", 2),
    }


def test_an_id_that_wandb_would_refuse_is_respelt(tmp_path):
    record(tracker(mode="offline"), tmp_path / "run", "2026-01-01/a:b#1", num_steps=1)
    stored = read_back(tmp_path / "run")
    assert (stored["run"].run_id, stored["run"].display_name) == ("2026-01-01-a-b-1", "2026-01-01/a:b#1")


@pytest.mark.parametrize("answer", [401, 500, "hang", "closed"])
def test_a_server_that_does_not_serve_makes_the_run_offline_in_bounded_time(tmp_path, server, monkeypatch, answer):
    server.answer = answer
    if answer == "closed":
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
    began = time.monotonic()
    opening, closing = record(tracker(), tmp_path / "run")
    assert time.monotonic() - began < 40
    assert opening.startswith("W&B offline (CommError: ")
    assert "\n" not in opening
    assert "wandb sync" in closing
    assert len(read_back(tmp_path / "run")["history"]) == 21


def test_a_server_that_is_lost_in_the_run_delays_its_end_only_for_so_long(tmp_path, server):
    watch = tracker(finish_timeout_s=2)
    begin(watch, tmp_path / "run")
    server.answer = "hang"
    began = time.monotonic()
    for step in range(20):
        watch.log_step(step_row(step))
    closing = watch.finish(SUMMARY)
    assert time.monotonic() - began < 20
    assert "within 2 s" in closing
    server.closing.set()
    server.answer = "ok"
    sync(closing)
    assert len(server.runs["run-1"].rows("train/loss")) == 20


def test_a_client_process_that_dies_costs_one_warning(tmp_path, server, capfd):
    watch = tracker()
    begin(watch, tmp_path / "run")
    for child in psutil.Process().children(recursive=True):
        if "wandb" in child.name():
            child.kill()
    began = time.monotonic()
    for step in range(50):
        watch.log_step(step_row(step))
        time.sleep(0.01)
    watch.finish(SUMMARY)
    assert time.monotonic() - began < 40
    warnings = [line for line in capfd.readouterr().err.splitlines() if "W&B is off" in line]
    assert len(warnings) == 1


def test_a_log_that_breaks_costs_one_warning_and_the_tracker_is_off(tmp_path, capfd, monkeypatch):
    watch = tracker(mode="offline")
    begin(watch, tmp_path / "run")
    watch.log_step(step_row(0))
    calls = []

    def broken(row):
        calls.append(row)
        raise RuntimeError("disk\nfull")

    monkeypatch.setattr(watch._run, "log", broken)
    for step in range(1, 5):
        watch.log_step(step_row(step))
    watch.log_evaluation(evaluation_row(4))
    watch.finish(SUMMARY)
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err == "W&B is off for the rest of this run: RuntimeError: disk full\n"
    assert len(calls) == 1
    assert read_back(tmp_path / "run")["exit"] == 0


def test_a_row_that_is_none_is_no_error_of_the_run(tmp_path, capfd):
    watch = tracker(mode="offline")
    begin(watch, tmp_path / "run")
    watch.log_step({"loss": 1.0})
    watch.log_evaluation({"step": 1})
    watch.finish({})
    assert capfd.readouterr().err.count("W&B is off") == 1


def test_a_finish_that_breaks_costs_one_warning(tmp_path, capfd, monkeypatch):
    watch = tracker(mode="offline")
    begin(watch, tmp_path / "run")
    finish = watch._run.finish
    monkeypatch.setattr(watch._run, "finish", lambda exit_code: finish() or 1 / 0)
    assert watch.finish(SUMMARY) is None
    assert watch.finish(SUMMARY) is None
    assert capfd.readouterr().err == "W&B is off for the rest of this run: ZeroDivisionError: division by zero\n"


def test_a_start_that_breaks_leaves_the_run_without_tracker(tmp_path, capfd):
    (tmp_path / "file").write_text("not a directory")
    watch = tracker(mode="offline")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wandb.init", lambda **_: 1 / 0)
        assert begin(watch, tmp_path / "run") is None
    watch.log_step(step_row(0))
    assert watch.finish(SUMMARY) is None
    assert capfd.readouterr().err == "W&B is off for this run: ZeroDivisionError: division by zero\n"


def test_nothing_is_printed_by_wandb_itself(tmp_path, server, capfd):
    record(tracker(), tmp_path / "online", "a")
    record(tracker(mode="offline"), tmp_path / "offline", "b")
    server.answer = 401
    record(tracker(), tmp_path / "refused", "c")
    assert capfd.readouterr() == ("", "")


def test_neither_the_key_nor_the_environment_is_written_or_sent(tmp_path, server, monkeypatch):
    planted = {"WANDB_API_KEY": KEY, "SECRET_TOKEN": "plantedsecretvalue", "WANDB_NOTES_FILE": "plantedothervalue"}
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: "plantedhostname")
    hidden = [*planted.values(), "plantedhostname", "torch==", "git@", str(Path(__file__).parent)]
    record(tracker(), tmp_path / "run", "a")
    record(tracker(mode="offline"), tmp_path / "run", "b")
    server.answer = 401
    record(tracker(), tmp_path / "run", "c")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert sum(path.suffix == ".wandb" for path in files) == 4  # the refused run has one for each attempt
    for path in files:
        content = path.read_bytes()
        found = [value for value in hidden if value.encode() in content]
        assert found == [], path
    assert {name for run in server.runs.values() for name in run.files} <= {"config.yaml", "wandb-summary.json"}
    sent = repr(server.runs)
    assert [value for value in hidden if value in sent] == []


def test_its_files_are_below_the_runs_directory(tmp_path, server):
    record(tracker(), tmp_path / "run", "a")
    record(tracker(mode="offline"), tmp_path / "run", "b")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"wandb"}
    names = {re.sub(r"\d{8}_\d{6}", "T", path.name) for path in (tmp_path / "run" / "wandb").iterdir()}
    assert names == {"run-T-a", "offline-run-T-b"}
    assert not (tmp_path / "home" / "elsewhere").exists()
    assert not (tmp_path / "home" / "wandb").exists()


@pytest.mark.parametrize(("stated", "mode"), [("offline", "online"), ("dryrun", "auto")])
def test_the_environments_mode_wins_over_online(tmp_path, server, monkeypatch, stated, mode):
    monkeypatch.setenv("WANDB_MODE", stated)
    opening, _ = record(tracker(mode=mode), tmp_path / "run", num_steps=1)
    assert opening.startswith("W&B offline: ")
    assert server.num_requests == 0


def test_the_environments_mode_wins_over_offline_and_disabled(tmp_path, server, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    for index, mode in enumerate(("offline", "disabled")):
        opening, _ = record(tracker(mode=mode), tmp_path / "run", f"run-{index}", num_steps=1)
        assert opening == f"W&B online: {server.url}/me/runner/runs/run-{index}"


def test_disabled_is_off(tmp_path, monkeypatch):
    assert record(tracker(mode="disabled"), tmp_path / "run") == (None, None)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert record(tracker(mode="online"), tmp_path / "run") == (None, None)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_mode_in_the_environment_that_wandb_does_not_have_is_bad_input(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(BadInput, match="WANDB_MODE=ofline"):
        begin(tracker(), tmp_path / "run")


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_without_a_login_the_run_is_offline_and_says_why(tmp_path, mode):
    opening, _ = record(tracker(mode=mode), tmp_path / "run", num_steps=1)
    assert opening.startswith("W&B offline (not logged in, see `wandb login`): `wandb sync ")


def in_child(code, tmp_path, **variables):
    """Run code in a fresh process on a terminal of its own that nobody types on; its output."""
    master, slave = pty.openpty()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"} | variables
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    output = b""
    try:
        while chunk := os.read(master, 4096):
            output += chunk
    except OSError:  # how a terminal says that its last process has ended
        pass
    finally:
        os.close(master)
    assert process.wait(timeout=60) == 0, output.decode()
    return output.decode().replace("\r\n", "\n")


CHILD = """
import sys
from pathlib import Path
from runner import machine, trackers
{patch}
options = dict(project="p", entity=None, group=None, name=None, tags=[], init_timeout_s=5, finish_timeout_s=5)
tracker = trackers.Wandb(mode={mode!r}, **options)
print(tracker.start(directory=Path(sys.argv[1]), run={{"id": "r"}}, levers={{}}, config={{}}))
tracker.log_step({{"step": 0, "loss": 1.0}})
tracker.finish({{"status": "ok"}})
assert "torch" not in sys.modules
"""


@pytest.mark.timeout(120)
def test_a_key_is_never_asked_for_even_on_a_terminal(tmp_path):
    # As if it were thought to be logged in: the client looks for a key, finds none and would ask.
    code = CHILD.format(patch="machine.is_wandb_logged_in = lambda: True", mode="online")
    with WandbServer() as backend:
        output = in_child(code, tmp_path, WANDB_BASE_URL=backend.url)
    assert output.startswith("W&B offline (UsageError: ")
    assert len(output.splitlines()) == 1


def test_offline_contacts_nobody(tmp_path):
    with WandbServer() as backend:
        output = in_child(
            CHILD.format(patch="", mode="offline"), tmp_path, WANDB_BASE_URL=backend.url, WANDB_API_KEY=KEY
        )
        assert output.startswith("W&B offline: ")
        assert backend.num_requests == 0


def test_without_wandb_installed_start_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(BadInput, match="pip install wandb"):
        begin(tracker(mode="offline"), tmp_path / "run")


def test_a_folder_of_wandb_runs_is_not_taken_for_the_package(tmp_path, monkeypatch):
    (tmp_path / "cwd" / "wandb").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "cwd")])
    for name in [name for name in sys.modules if name.split(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(BadInput, match="pip install wandb"):
        begin(tracker(mode="offline"), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"project": "a/b"}, "tracker.project='a/b'"),
        ({"project": ""}, "tracker.project=''"),
        ({"tags": ["ok", ""]}, "tracker.tags"),
        ({"tags": ["x" * 65]}, "tracker.tags"),
        ({"mode": "on"}, "tracker.mode=on"),
        ({"init_timeout_s": 0}, "tracker.init_timeout_s=0"),
        ({"finish_timeout_s": float("inf")}, "tracker.finish_timeout_s=inf"),
    ],
)
def test_what_wandb_would_refuse_is_bad_input_at_once(changes, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        tracker(**changes)


def test_importing_the_module_imports_neither_torch_nor_wandb():
    code = "import runner.trackers, sys; assert not {'torch', 'wandb'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
