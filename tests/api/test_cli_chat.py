"""nibble chat, through pipes and on a pseudo terminal."""

import os
import pty
import re
import signal
import subprocess
import time

import pytest


def talk(nibble_bin, model_dir, text, *options):
    return subprocess.run([nibble_bin, "chat", "--model", model_dir, "--max-tokens", "12", "--temperature", "0", *options], input=text,
                          capture_output=True, text=True, timeout=240)


def test_pipe(nibble_bin, model_dir):
    result = talk(nibble_bin, model_dir, "What is 3+5?\n", "--no-think")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert "\x1b" not in result.stdout
    assert re.search(r"\d+ tokens, first after \d+\.\d+ s", result.stderr)


def test_repeats(nibble_bin, model_dir):
    """The same line after /reset gets the same answer."""
    result = talk(nibble_bin, model_dir, "Say a word\n/reset\nSay a word\n", "--no-think", "--reasoning-parser", "none")
    assert result.returncode == 0, result.stderr
    one = talk(nibble_bin, model_dir, "Say a word\n", "--no-think", "--reasoning-parser", "none")
    assert result.stdout == one.stdout * 2


def test_commands(nibble_bin, model_dir):
    result = talk(nibble_bin, model_dir, "/think off\n/think on\n/nonsense\n\n/exit\nnever read\n")
    assert result.returncode == 0
    assert result.stdout == ""
    assert "thinking is off" in result.stderr and "thinking is on" in result.stderr and "commands:" in result.stderr


def test_context_is_full(nibble_bin, model_dir):
    result = talk(nibble_bin, model_dir, "word " * 5000 + "\n", "--context-length", "256")
    assert result.returncode == 1
    assert "256" in result.stderr


@pytest.mark.parametrize("args,sentence", [(["--reasoning-parser", "wizard"], "wizard"), (["--chat-template", "/nope"], "/nope")])
def test_bad_values(nibble_bin, model_dir, args, sentence):
    result = talk(nibble_bin, model_dir, "x\n", *args)
    assert result.returncode == 1
    assert sentence in result.stderr


class Terminal:
    def __init__(self, *command):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(command[0], [str(c) for c in command])
        self.text = ""

    def wait_for(self, pattern, seconds=120):
        end = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            assert time.monotonic() < end, repr(self.text)
            try:
                self.text += os.read(self.fd, 65536).decode(errors="replace")
            except OSError: # the other end is closed
                assert re.search(pattern, self.text), repr(self.text)

    def send(self, data):
        self.text = ""
        os.write(self.fd, data)

    def status(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_terminal(nibble_bin, model_dir):
    t = Terminal(nibble_bin, "chat", "--model", model_dir, "--temperature", "0", "--max-tokens", "8")
    try:
        t.wait_for(r"\n?> $")
        t.send(b"What is 3+5?\n")
        t.wait_for(r"\x1b\[2m.+tokens")
        t.wait_for(r"> $")
        t.send(b"/exit\n")
        assert t.status() == 0
    finally:
        os.close(t.fd)


def test_interrupt(nibble_bin, model_dir):
    """Ctrl-C ends the answer, the conversation goes on; at the prompt it ends the program."""
    for seed in range(1, 9): # an answer may end by itself just before; Ctrl-C is then for its end or for the prompt
        t = Terminal(nibble_bin, "chat", "--model", model_dir, "--temperature", "1", "--seed", str(seed), "--no-think")
        try:
            t.wait_for(r"> $")
            t.send(b"Tell a long story\n")
            t.wait_for(r"story\r\n.")
            os.kill(t.pid, signal.SIGINT)
            t.wait_for(r"tokens, first after[^\n]*\n")
            if "interrupted" not in t.text:
                os.kill(t.pid, signal.SIGKILL)
                t.status()
                continue
            t.wait_for(r"> $")
            t.send(b"/reset\n")
            t.wait_for(r"> $")
            os.kill(t.pid, signal.SIGINT)
            assert t.status() == 0
            return
        finally:
            os.close(t.fd)
    pytest.skip("every answer ended by itself")


def test_interrupt_at_the_prompt(nibble_bin, model_dir, sanitized):
    """However soon after the prompt, or before it: Ctrl-C is not lost."""
    for delay in [None, 0.0] if sanitized else [None, 0.0, 0.0, 0.0, 0.0005, 0.002, 0.02]:
        t = Terminal(nibble_bin, "chat", "--model", model_dir)
        try:
            if delay is None: # while it loads: no later than at the prompt
                time.sleep(0.02)
            else:
                t.wait_for(r"> $")
                time.sleep(delay)
            os.write(t.fd, b"\x03")
            assert t.status() in (0, -signal.SIGINT if delay is None else 0)
        finally:
            os.close(t.fd)


def test_lines(nibble_bin, model_dir):
    """Several lines in one piece, line ends of both kinds, and a last line without one."""
    whole = talk(nibble_bin, model_dir, "/think off\r\nSay a word\n\n/reset\nSay a word", "--reasoning-parser", "none")
    assert whole.returncode == 0, whole.stderr
    one = talk(nibble_bin, model_dir, "Say a word\n", "--no-think", "--reasoning-parser", "none")
    assert one.stdout.strip() and whole.stdout == one.stdout * 2
