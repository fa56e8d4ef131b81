"""How the data files are written."""

import json


def write_lines(path, header, lists):
    """JSON with one element of each list a line, so that a change shows as a change of its lines."""
    compact = lambda value: json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    parts = [f'"{key}":{compact(value)}' for key, value in header.items()]
    for key, values in lists.items():
        parts.append(f'"{key}":[\n' + ",\n".join(map(compact, values)) + "\n]")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
