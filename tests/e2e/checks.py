"""A list of checks, run in order, a line for each."""

import sys
import traceback


class Checks:
    def __init__(self):
        self._all = []

    def __call__(self, function):
        """Decorator: adds a check; its docstring is its name."""
        self._all.append(function)
        return function

    def run(self, *arguments, only=None):
        """Runs every check with the given arguments; ends the process with 0 when all pass, else with 1."""
        chosen = [f for f in self._all if only is None or only in f.__name__]
        failed = 0
        for function in chosen:
            try:
                function(*arguments)
                print(f"ok   {function.__name__}: {function.__doc__}", flush=True)
            except Exception:  # a failed check must not hide the others
                failed += 1
                print(f"FAIL {function.__name__}: {function.__doc__}\n{traceback.format_exc()}", flush=True)
        print(f"{len(chosen) - failed} of {len(chosen)} checks passed")
        sys.exit(0 if chosen and not failed else 1)


def equal(got, want, what=""):
    assert got == want, f"{what}: got {got!r}, want {want!r}"
