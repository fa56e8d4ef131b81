"""A Baton cluster as a benchmark's child process: `baton up` until closed."""

import http.client
import json
import os
import signal
import socket
import subprocess


def free_ports(count):
    """So many ports, all different: they are held together while they are chosen."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def random_ids(count, salt):
    """A prompt like no other, as token ids that every model has."""
    return [(i * 2654435761 + salt * 97) % 40000 for i in range(count)]


class Cluster:
    """`baton up` with some flags and further variables of its environment."""

    def __init__(self, baton, model, flags, variables=None):
        self.port, grpc, internal = free_ports(3)
        addresses = ["--http", f"127.0.0.1:{self.port}", "--grpc", f"127.0.0.1:{grpc}", "--internal", f"127.0.0.1:{internal}"]
        command = [baton, "up", "--model", model, *addresses, *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **(variables or {})})
        # It says so once all processes are ready, and hardly anything later, so that the pipe never fills.
        if not self.process.stdout.readline():
            raise SystemExit("the cluster did not start; its message is above")
        self.model = json.load(self.request("GET", "/v1/models"))["data"][0]["id"]

    def request(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request(method, path, body and json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse()

    def completion(self, ids, max_tokens):
        """(path, body) of a greedy request that streams exactly so many tokens."""
        return "/v1/completions", {"model": self.model, "prompt": ids, "max_tokens": max_tokens, "temperature": 0,
                                   "stream": True, "ignore_eos": True, "return_token_ids": True}

    @staticmethod
    def tokens(event, _before=0):
        """How many tokens an event of the stream carries, after so many before it."""
        choices = event.get("choices") or [{}]
        return len(choices[0].get("token_ids") or [])

    def close(self):
        self.process.send_signal(signal.SIGINT)
        self.process.wait()
