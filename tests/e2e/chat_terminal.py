"""Talks to `baton chat` in a terminal of its own: editing, history, commands, an answer that is stopped, and the end.

    chat_terminal.py BATON ROUTER
"""
import os
import pty
import select
import sys
import termios
import time

PATIENCE = 120
baton, router = sys.argv[1:]
pid, terminal = pty.fork()
if pid == 0:
    os.execv(baton, [baton, "chat", "--router", router])
settings = termios.tcgetattr(terminal)
seen = b""


def until(*words):
    """Reads until all of these came since the last time."""
    global seen
    end = time.monotonic() + PATIENCE
    while not all(word in seen for word in words):
        assert time.monotonic() < end, f"{words} did not come: {seen.decode(errors='replace')}"
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 65536)
    said, seen = seen, b""
    return said


def keys(*some):
    os.write(terminal, b"".join(some))


UP, LEFT, DELETE_BACK, ENTER, INTERRUPT, END = b"\x1b[A", b"\x1b[D", b"\x7f", b"\r", b"\x03", b"\x04"

until(b"/clear", b"> ")
# A letter too many is taken out again.
keys("Why is the skyy blue? Ä".encode(), DELETE_BACK, DELETE_BACK, LEFT * 6, DELETE_BACK, ENTER)
answer = until(b"tokens/s", b"\x1b[0m\r\n\r\x1b[K> ")
assert b"Why is the sky blue?\r" in answer, answer
assert b"TTFT" in answer and b"prefill w" in answer and b"decode w" in answer, answer
keys(b"Write a very long story, and then another one.", ENTER)
until(b"one.\r\r\n", b" ")
time.sleep(1)
keys(INTERRUPT)
stopped = until(b"stopped", b"> ")
keys(UP, UP)
until(b"Why is the sky blue?")
keys(INTERRUPT, b"/system You are a cat.", ENTER)
until(b"The system message is set.", b"> ")
keys(b"/clear", ENTER)
until(b"begins anew", b"> ")
keys(END)
assert os.waitpid(pid, 0)[1] == 0
assert termios.tcgetattr(terminal) == settings, "the terminal is as it was"
print("chat in a terminal: fine")
