#!/usr/bin/env python3
"""Streams answers over and over and checks each; runs in a pod, with nothing but Python's own library.

    load.py URL MODEL STREAMS
    load.py URL MODEL again

Every request has a salt of its own, so every prompt is computed and handed over. Each answer must equal the first one to its prompt. Whoever
runs it writes a name to the standard input at the beginning of each phase, and "end" at the end. A line of JSON comes out after the first
answer, for each phase when the next begins, and for all of them at the end, when every stream has ended: a stream counts for the phase in which
it was connected. A connection that breaks is tried again, as clients do, and counts for the phase in which it broke: a stream cannot outlive its
router.
"""

import collections
import http.client
import json
import random
import sys
import threading
import time
import urllib.parse

PROMPTS = ["Why is the sky blue?", "What is a comet made of?", "How do bees find their way?", "Why do we dream?", "What is inflation?"]
TOKENS = 96
# So often a question is repeated in a long prompt, which has about 700 tokens then: under load, too, they are computed later than taken from a
# store.
LONG = 120
lock = threading.Lock()
answers = {}
phase = "start"
ending = threading.Event()
counts = collections.defaultdict(collections.Counter)
gaps = collections.defaultdict(float)
errors = {}


class Refused(RuntimeError):
    """Nobody is there to answer, and the router says so before it begins."""


def ask(connection, model, prompt, last, salt):
    """One streamed answer, and the longest time without a token since `last`."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS, "temperature": 0, "stream": True,
            "ignore_eos": True, "cache_salt": salt}
    gap, text, ended = 0.0, "", False
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status == 503:
        raise Refused(f"503: {answer.read().decode()[:300]}")
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.read().decode()[:300] or dict(answer.headers)}")
    for line in answer:
        if line.startswith(b"data: {"):
            now = time.monotonic()
            gap, last = max(gap, now - last), now
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(json.dumps(event["error"])[:300])
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
        ended |= line.startswith(b"data: [DONE]")
    connection.close()
    if not ended:
        raise ConnectionError("the stream broke off")
    return text, gap


def stream(url, model, number):
    while not ending.is_set():
        prompt, tried = PROMPTS[number % len(PROMPTS)], time.monotonic()
        number += 1
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=120)
        try:
            connection.connect()
            begun = phase
            text, gap = ask(connection, model, prompt, tried, f"{random.getrandbits(64):x}")
            with lock:
                if not answers:
                    print(json.dumps({"first": prompt}), flush=True)
                right = answers.setdefault(prompt, text) == text
                counts[begun]["right" if right else "wrong"] += 1
                gaps[begun] = max(gaps[begun], gap)
        except (ConnectionError, http.client.HTTPException, OSError) as error:
            with lock:
                counts[phase]["connections lost"] += 1
                errors.setdefault(phase, repr(error))
            time.sleep(0.5)
        except RuntimeError as error:
            with lock:
                counts[begun]["refused" if isinstance(error, Refused) else "failed"] += 1
                errors[begun] = str(error)
            time.sleep(0.5)


def again(url, model):
    """Prints the answers to long prompts."""
    answers = []
    for prompt in PROMPTS:
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=120)
        answers.append(ask(connection, model, " ".join([prompt] * LONG), time.monotonic(), prompt)[0])
    print(json.dumps(answers))


def say(which):
    """What came so far of the streams that began in a phase."""
    with lock:
        print(json.dumps({"phase": which, **counts[which], "longest gap": gaps[which], "error": errors.get(which)}), flush=True)


def main():
    global phase
    phases = [phase]
    url, model = urllib.parse.urlparse(sys.argv[1]), sys.argv[2]
    if sys.argv[3] == "again":
        return again(url, model)
    streams = int(sys.argv[3])
    threads = [threading.Thread(target=stream, args=(url, model, number)) for number in range(streams)]
    for thread in threads:
        thread.start()
    for line in map(str.strip, sys.stdin):
        if line == "end":
            break
        before, phase = phase, line
        phases.append(phase)
        say(before)
    say(phase)
    ending.set()
    for thread in threads:
        thread.join()
    for each in phases:
        say(each)
    total = sum(counts.values(), collections.Counter())
    print(json.dumps({"phase": "all", **total, "longest gap": max(gaps.values(), default=0), "error": next(iter(errors.values()), None)}), flush=True)


main()
