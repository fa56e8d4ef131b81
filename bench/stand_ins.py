#!/usr/bin/env python3
"""Makes stand-ins for CUDA's libraries: bench/stand_ins.py FOLDER, with the Python in whose packages torch is.

The wheel of torch links 3 GB of libraries that a CPU never calls. One small library stands in for all of them: it has each name and version that
torch asks for, and each function answers 999, an error of CUDA's. The runtime (cudart) is the real one, since torch asks it for GPUs.
"""

import collections
import pathlib
import re
import site
import subprocess
import sys


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    names, libraries = collections.defaultdict(set), set()
    for library in pathlib.Path(site.getsitepackages()[0], "torch/lib").glob("*.so"):
        for name, version in re.findall(r" U ((?:cu|nv|nccl)(?!da)\w+)(?:@(\S+))?", output("nm", "-D", library)):
            names[version].add(name)
        libraries |= set(re.findall(r"NEEDED.*\[(lib(?:cu(?!da)|nv|nccl)\S+)\]", output("readelf", "-d", library)))
    source, versions, made = folder / "functions.c", folder / "versions", folder / "stand-in.so"
    source.write_text("".join(f"int {name}(void) {{ return 999; }}\n" for name in set().union(*names.values())))
    versions.write_text("".join(f"{version} {{ {'; '.join(group)}; }};\n" for version, group in names.items() if version))
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", made, source, f"-Wl,--version-script={versions}"], check=True)
    for name in libraries:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(made.name)


if __name__ == "__main__":
    main()
