import io
import os
import pty
import subprocess
import sys
import textwrap
import time

import pytest

from sextet.core.console import Console, duration, headline


class Screen(io.StringIO):
    """A terminal that records what is written to it."""

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.42, "0.4 s"),
        (3.0, "3 s"),
        (45.2, "45 s"),
        (70, "1 min 10 s"),
        (120, "2 min"),
        (7500, "2 h 5 min"),
        (1e5, "1 d 3 h"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_headline_prefers_returns_and_losses():
    assert headline({"train/clip_frac": 0.1, "train/loss": 0.25, "eval/mean_return": 45.0}) == [
        "mean return 45",
        "loss 0.250",
    ]
    assert headline({"time/step_s": 2.0, "other": 1.0}) == ["step s 2"]
    assert headline({}) == []


def test_plain_lines_name_stage_step_metric_speed_and_time_left(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    console = Console(stream=stream, interval=10)
    with console.task("demo", 5, start=1), console.task("MEP population", 80):
        for step in range(1, 81):
            clock[0] += 1
            console.update(step, {"train/return": 3.0 * step} if step % 2 == 0 else {})
            if step == 5:
                console.saved()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "[0:00:01] demo > 2/5 MEP population: step 1/80"  # the first step tells no speed
    progress = "step 11/80, return 30, 1 steps/s, about 1 min 9 s left, saved 6 s ago"
    assert lines[1] == f"[0:00:11] demo > 2/5 MEP population: {progress}"
    assert lines[-2:] == [
        "[0:01:20] demo > 2/5 MEP population: done in 1 min 20 s, return 240",
        "[0:01:20] demo: done in 1 min 20 s",
    ]
    assert len(lines) == 10


def test_quiet_shows_nothing_and_short_tasks_leave_no_line():
    for quiet in (True, False):
        stream = io.StringIO()
        console = Console(quiet=quiet, stream=stream)
        with console.task("brief", 3):
            pass
        if quiet:
            console.update(1, {"loss": 1.0})
            console.say("unseen")
        console.close()
        assert stream.getvalue() == ""


def test_a_failed_task_is_not_called_done(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    console = Console(stream=stream)
    with pytest.raises(KeyError), console.task("stage", 3):
        clock[0] = 60.0
        raise KeyError
    assert "done" not in stream.getvalue()
    with console.task("next"):
        console.update(1)
    assert stream.getvalue().endswith("next: step 1\n")


@pytest.mark.parametrize("columns", [40, 120])
@pytest.mark.parametrize("no_color", [True, False])
def test_terminal_bar_fits_one_line(monkeypatch, columns, no_color):
    monkeypatch.setenv("COLUMNS", str(columns))
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen()
    console = Console(stream=screen)
    with console.task("population of 5 members on cramped_room", 80):
        console.update(12, {"train/loss": 0.5})
        console.say("a line [not markup]")
    console.close()
    shown = screen.getvalue()
    assert "step 12/80" in shown or columns == 40
    assert "a line [not markup]" in shown
    assert ("━" in shown) == (columns == 120)
    assert ("\x1b[38" in shown or "\x1b[3" in shown) == (columns == 120 and not no_color)
    bar = next(line for line in shown.replace("\r", "\n").split("\n") if "population" in line)
    assert len(bar) <= columns + 80  # escape codes of the bar come on top of its columns
    assert shown.count("\n") <= 2


def test_terminal_without_utf8_gets_replacements():
    raw = io.BytesIO()
    screen = io.TextIOWrapper(raw, encoding="ascii")
    screen.isatty = lambda: True
    console = Console(stream=screen)
    console.say("müde → fertig")
    with console.task("Größe", 10):
        console.update(3)
    console.close()
    screen.flush()
    assert b"m?de ? fertig" in raw.getvalue()
    assert b"Gr??e: step 3/10" in raw.getvalue()


def test_closed_streams_do_not_stop_the_caller():
    stream = io.StringIO()
    console = Console(stream=stream, interval=0)
    stream.close()
    console.update(1, {"loss": 1.0})
    console.say("nobody reads this")
    screen = Screen()
    console = Console(stream=screen)
    console.update(1)
    screen.close()
    console.say("nor this")
    console.close()


def run_program(body, **options):
    program = "import sys, time\nfrom sextet.core.console import Console\n" + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, **options)


def test_reader_of_the_pipe_leaves_and_the_program_ends_well():
    program = """
        console = Console(stream=sys.stdout, interval=0)
        for step in range(2000):
            console.update(step)
        sys.stderr.write("worked")
    """
    process = run_program(program, stdout=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=60)) == (b"worked", 0)
    process.stderr.close()


def test_real_terminal_shows_the_bar_and_leaves_it_clean():
    reader, writer = pty.openpty()
    program = """
        console = Console(stream=sys.stdout)
        with console.task("training", 10):
            for step in range(1, 11):
                console.update(step, {"loss": 1 / step})
                time.sleep(0.05)
        console.close()
        print("end")
    """
    process = run_program(program, stdout=writer, env={**os.environ, "COLUMNS": "100", "LINES": "24"})
    errors = process.stderr.read()
    assert process.wait(timeout=60) == 0, errors
    process.stderr.close()
    os.close(writer)
    shown = b""
    while True:
        try:
            piece = os.read(reader, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(reader)
    assert b"training: step 1/10, loss 1" in shown
    assert shown.endswith(b"end\r\n")
    assert b"\x1b[?25h" in shown  # the cursor is shown again


def test_update_costs_little_when_nothing_is_due():
    console, metrics = Console(stream=io.StringIO(), interval=1000), {"loss": 1.0}
    console.update(0, metrics)
    best = 1.0
    for _ in range(5):
        started = time.perf_counter()
        for step in range(2000):
            console.update(step, metrics)
        best = min(best, (time.perf_counter() - started) / 2000)
    assert best < 5e-6


def test_import_is_light():
    heavy = ("rich", "scipy", "numpy", "torch")
    code = f"import sys, sextet.core.console; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
