"""What is printed, where, and with which characters."""

import errno
import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from vitpt.cli import console


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)


def test_say_goes_to_stderr(capsys):
    console.say("hello")
    assert capsys.readouterr() == ("", "hello\n")


def test_say_escapes_control_characters(capsys):
    console.say("file \x1b[2J\r\n.png \u202egpj")
    assert capsys.readouterr().err == "file \\x1b[2J\\x0d\\x0a.png \\u202egpj\n"


@pytest.mark.parametrize(
    ("name", "shown"),
    [("plain é 中.jpg", "plain é 中.jpg"), ("a\tb", "a\\x09b"), ("\udcff", "\\udcff"), ("\x9b1m", "\\x9b1m"), ("", "")],
)
def test_escape_name(name, shown):
    assert console.escape_name(name) == shown


def test_json_is_one_document_without_nan(capsys):
    console.result_json({"loss": float("nan"), "best": [1.5, float("inf")], "name": "é", 3: None})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"loss": None, "best": [1.5, None], "name": "é", "3": None}
    assert err == ""


def test_plain_table_is_aligned_and_never_cut(capsys):
    long_name = "x" * 300
    console.result_table("title", ["name", "count", "loss"], [("a\nb", 3, 0.123456789), (long_name, 12345, None)])
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "title"
    assert lines[1].split() == ["name", "count", "loss"]
    assert lines[2].split() == ["a\\nb".replace("\\n", "\\x0a"), "3", "0.123457"]
    assert lines[3].split() == [long_name, "12345"]
    assert lines[2].index("3 ") == lines[3].index("12345") + 4  # numbers end in one column
    assert err == ""


def test_empty_table(capsys):
    console.result_table(None, ["a", "b"], [])
    assert capsys.readouterr().out == "a  b\n"


def test_other_ranks_are_silent(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    console.say("x")
    console.result_json({})
    console.result_text("x")
    console.result_table(None, ["a"], [["b"]])
    with console.progress(3, "work", "things") as bar:
        bar.advance(3)
    assert capsys.readouterr() == ("", "")


def test_plain_progress_is_a_few_lines(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with console.progress(1000, "shard", "images") as bar:
        for _ in range(100):
            now[0] += 0.25
            bar.advance(10, loss=0.5)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "shard: 400/1,000 images, 40 images/s, 0:15 left, loss 0.5",
        "shard: 800/1,000 images, 40 images/s, 0:05 left, loss 0.5",
        "shard: 1,000/1,000 images, 40 images/s, 0:25 taken, loss 0.5",
    ]


def test_progress_counts_the_rate_from_where_it_starts(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with console.progress(8100, "train", "steps", start=900) as bar:
        now[0] += 20
        bar.advance(100)
    assert capsys.readouterr().err == "train: 1,000/8,100 steps, 5 steps/s, 23:40 left\n"


def test_progress_without_total_or_plain_lines(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with console.progress(None, "read", "bytes") as bar:
        now[0] += 3675
        bar.advance(3_675_000)
    assert capsys.readouterr().err == "read: 3,675,000 bytes, 1,000 bytes/s, 1:01:15 taken\n"
    with console.progress(3, "train", "steps", plain=False) as bar:
        bar.advance(3)
    assert capsys.readouterr().err == ""


def test_no_last_line_after_an_error(capsys):
    def work():
        with console.progress(3, "work", "things"):
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        work()
    assert capsys.readouterr().err == ""


def on_a_terminal(code, **env):
    """Run code with stderr and stdout on a pseudo terminal; return everything it wrote."""
    ours, theirs = pty.openpty()
    base = {name: value for name, value in os.environ.items() if name not in ("RANK", "NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=theirs, stderr=theirs, env=base | {"TERM": "xterm", "COLUMNS": "100"} | env
    )
    os.close(theirs)
    written = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 1)[0]:
            try:
                part = os.read(ours, 4096)
            except OSError:  # Linux says so when the other end is closed
                break
            if not part:
                break
            written += part
    assert process.wait(60) == 0
    os.close(ours)
    return written.decode()


PROGRESS = """
import time
from vitpt.cli.console import progress, result_table, say
with progress(20, "shard [x]", "images") as bar:
    for i in range(20):
        bar.advance(1, loss=i)
        time.sleep(0.02)
        if i == 10:
            say("a line above")
result_table("res[u]lts", ["name", "value"], [("[b]a", 1.5)])
"""


def test_a_terminal_gets_a_bar_and_a_table():
    written = on_a_terminal(PROGRESS)
    assert "\x1b[" in written
    assert "shard [x]" in written
    assert "20/20 images" in written
    assert "a line above" in written
    assert "res[u]lts" in written
    assert "[b]a" in written


def test_no_color():
    """Cursor movement stays, colours go."""
    written = on_a_terminal(PROGRESS, NO_COLOR="1")
    colours = [code for code in re.findall(r"\x1b\[([\d;]*)m", written) if re.search(r"(^|;)[349]\d", code)]
    assert colours == []
    assert "20/20 images" in written


def test_a_dumb_terminal_gets_plain_lines():
    written = on_a_terminal(PROGRESS, TERM="dumb")
    assert "\x1b" not in written
    assert "shard [x]: 20/20 images" in written


def test_a_pipe_gets_no_control_characters_and_no_rich():
    code = PROGRESS + "\nimport sys\nassert 'rich' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"FORCE_COLOR": "1"}, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", done.stdout + done.stderr)


class Gone:
    """A terminal that hung up."""

    def write(self, text):
        raise OSError(errno.EIO, "Input/output error")


def test_a_lost_terminal_ends_no_work(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Gone())
    for _ in range(2):
        console.say("a message for nobody")
    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(OSError, match="Input/output error"):
        console.result_json({})
