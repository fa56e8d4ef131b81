"""llama.cpp's C interface, called through ctypes in the library inside the `xllamacpp` wheel, or in one built from its source package.

Used by the reference generator beside this file and by the benchmark's peer. The wheel exports the whole C interface, so
logits and batches are available without a server in between. Struct layouts belong to the pinned wheel version; the
known defaults are checked when the library is loaded, so that another version fails loudly instead of misbehaving.
"""

import array
import ctypes as c
import importlib.metadata
import importlib.util

WHEEL = "xllamacpp"
VERSION = "2026.10.11549"
TYPE_F32, TYPE_F16 = 0, 1
FLASH_AUTO, FLASH_OFF, FLASH_ON = -1, 0, 1


class _ModelParams(c.Structure):
    _fields_ = [
        ("devices", c.c_void_p),
        ("tensor_buft_overrides", c.c_void_p),
        ("n_gpu_layers", c.c_int32),
        ("split_mode", c.c_int32),
        ("load_mode", c.c_int32),
        ("lazy_mode", c.c_int32),
        ("main_gpu", c.c_int32),
        ("tensor_split", c.c_void_p),
        ("progress_callback", c.c_void_p),
        ("progress_callback_user_data", c.c_void_p),
        ("kv_overrides", c.c_void_p),
        ("vocab_only", c.c_bool),
        ("check_tensors", c.c_bool),
        ("use_extra_bufts", c.c_bool),
        ("no_host", c.c_bool),
        ("no_alloc", c.c_bool),
        ("load_mtp", c.c_bool),
    ]


class _ContextParams(c.Structure):
    _fields_ = [
        *[(n, c.c_uint32) for n in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max", "n_outputs_max_per_seq")],
        *[(n, c.c_int32) for n in ("n_threads", "n_threads_batch", "ctx_type", "rope_scaling_type", "pooling_type", "attention_type", "flash_attn_type")],
        *[(n, c.c_float) for n in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")],
        ("yarn_orig_ctx", c.c_uint32),
        ("defrag_thold", c.c_float),
        ("cb_eval", c.c_void_p),
        ("cb_eval_user_data", c.c_void_p),
        ("type_k", c.c_int32),
        ("type_v", c.c_int32),
        ("abort_callback", c.c_void_p),
        ("abort_callback_data", c.c_void_p),
        *[(n, c.c_bool) for n in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified")],
        ("samplers", c.c_void_p),
        ("n_samplers", c.c_size_t),
        ("ctx_other", c.c_void_p),
    ]


class _Batch(c.Structure):
    _fields_ = [
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.c_void_p),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    ]


_LogCallback = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)


@_LogCallback
def _quiet(level, text, _):
    if level == 4:  # error
        print("llama.cpp:", text.decode(errors="replace"), end="")


_SIGNATURES = {
    "llama_backend_init": (None, []),
    "llama_print_system_info": (c.c_char_p, []),
    "llama_log_set": (None, [_LogCallback, c.c_void_p]),
    "llama_model_default_params": (_ModelParams, []),
    "llama_context_default_params": (_ContextParams, []),
    "llama_model_load_from_file": (c.c_void_p, [c.c_char_p, _ModelParams]),
    "llama_model_free": (None, [c.c_void_p]),
    "llama_model_get_vocab": (c.c_void_p, [c.c_void_p]),
    "llama_model_n_ctx_train": (c.c_int32, [c.c_void_p]),
    "llama_vocab_n_tokens": (c.c_int32, [c.c_void_p]),
    "llama_vocab_is_eog": (c.c_bool, [c.c_void_p, c.c_int32]),
    "llama_tokenize": (c.c_int32, [c.c_void_p, c.c_char_p, c.c_int32, c.POINTER(c.c_int32), c.c_int32, c.c_bool, c.c_bool]),
    "llama_detokenize": (c.c_int32, [c.c_void_p, c.POINTER(c.c_int32), c.c_int32, c.c_char_p, c.c_int32, c.c_bool, c.c_bool]),
    "llama_init_from_model": (c.c_void_p, [c.c_void_p, _ContextParams]),
    "llama_free": (None, [c.c_void_p]),
    "llama_get_memory": (c.c_void_p, [c.c_void_p]),
    "llama_memory_clear": (None, [c.c_void_p, c.c_bool]),
    "llama_batch_init": (_Batch, [c.c_int32, c.c_int32, c.c_int32]),
    "llama_batch_free": (None, [_Batch]),
    "llama_decode": (c.c_int32, [c.c_void_p, _Batch]),
    "llama_synchronize": (None, [c.c_void_p]),
    "llama_get_logits_ith": (c.POINTER(c.c_float), [c.c_void_p, c.c_int32]),
}


def load_library(path=None):
    """The wheel's shared library, or the one at `path`, with signatures declared and struct layouts checked."""
    found = importlib.metadata.version(WHEEL)
    if found != VERSION:
        raise SystemExit(f"{WHEEL} {found} is installed, {VERSION} is needed: pip install {WHEEL}=={VERSION}")
    lib = c.CDLL(path or importlib.util.find_spec("xllamacpp.xllamacpp").origin)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    lib.llama_log_set(_quiet, None)
    lib.llama_backend_init()
    params = lib.llama_context_default_params()
    known = (params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max, params.type_k, params.type_v, params.yarn_beta_fast)
    model = lib.llama_model_default_params()
    if known != (512, 2048, 512, 1, TYPE_F16, TYPE_F16, -1.0) or not model.use_extra_bufts or model.vocab_only:
        raise SystemExit(f"unexpected defaults {known}: the struct layouts above do not fit this library")
    return lib


class Model:
    """A GGUF file, loaded."""

    def __init__(self, path, repack=True, library=None):
        """`repack`: let llama.cpp rewrite quantised weights for this CPU, its default. `library`: as for `load_library`."""
        self.lib = load_library(library)
        params = self.lib.llama_model_default_params()
        params.use_extra_bufts = repack
        self.handle = self.lib.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.vocab = self.lib.llama_model_get_vocab(self.handle)
        self.vocab_size = self.lib.llama_vocab_n_tokens(self.vocab)

    def tokenize(self, text, add_special=True, parse_special=True):
        """Token ids of a text. `add_special` adds BOS where the file says so."""
        data = text.encode()
        ids = (c.c_int32 * (len(data) + 8))()
        count = self.lib.llama_tokenize(self.vocab, data, len(data), ids, len(ids), add_special, parse_special)
        if count < 0:
            raise RuntimeError(f"llama_tokenize: {count}")
        return list(ids[:count])

    def detokenize(self, ids):
        """Bytes that token ids stand for, special tokens written out."""
        ids = (c.c_int32 * len(ids))(*ids)
        out = c.create_string_buffer(len(ids) * 64 + 64)
        count = self.lib.llama_detokenize(self.vocab, ids, len(ids), out, len(out), False, True)
        if count < 0:
            raise RuntimeError(f"llama_detokenize: {count}")
        return out.raw[:count]

    def ends_generation(self, token):
        """Whether the file marks a token as an end of generation."""
        return self.lib.llama_vocab_is_eog(self.vocab, token)

    def close(self):
        self.lib.llama_model_free(self.handle)


class Context:
    """A KV cache and the buffers to run a model on it."""

    def __init__(self, model, tokens, sequences=1, threads=1, batch=512, flash=FLASH_AUTO):
        """`tokens`: room in the KV cache for all sequences together, split evenly; `batch`: most tokens in one step."""
        self.model, self.lib, self.batch_size = model, model.lib, batch
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = tokens, batch, batch, sequences
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = flash
        params.type_k = params.type_v = TYPE_F16
        # A part of the cache for each sequence: in a shared one, each would attend over all and mask the others.
        params.kv_unified = False
        self.handle = self.lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise SystemExit("llama.cpp cannot make a context")
        self.batch = self.lib.llama_batch_init(batch, 0, 1)

    def decode(self, rows):
        """One step. `rows`: (token, position, sequence, wants logits) for each token."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, output) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, output
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        status = self.lib.llama_decode(self.handle, batch)
        if status:
            raise RuntimeError(f"llama_decode: {status}")

    def prefill(self, ids, sequence=0):
        """Runs a prompt from position 0 in steps of the batch size; logits of the last token are then at index -1."""
        for start in range(0, len(ids), self.batch_size):
            chunk = ids[start : start + self.batch_size]
            self.decode([(t, start + i, sequence, start + i == len(ids) - 1) for i, t in enumerate(chunk)])

    def logits(self, index=-1):
        """Logits of the index-th row of the last step, as an array of floats."""
        pointer = self.lib.llama_get_logits_ith(self.handle, index)
        if not pointer:
            raise RuntimeError(f"no logits at row {index}")
        return array.array("f", c.string_at(pointer, 4 * self.model.vocab_size))

    def wait(self):
        self.lib.llama_synchronize(self.handle)

    def clear(self):
        """Empties the KV cache."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.handle), True)

    def close(self):
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.handle)
