#!/usr/bin/env python3
"""Writes the text part of a byte-level GGUF model as a Hugging Face directory, for programs that read no GGUF: gguf_directory.py MODEL DIRECTORY.
Needs the packages gguf and tokenizers. The pre-tokenizer is SmolLM2's."""
import json
import pathlib
import sys

from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = 3


def main(path, directory):
    fields = GGUFReader(path).fields
    values = lambda name: [fields[name].parts[at].tolist() for at in fields[name].data]
    texts = lambda name: [bytes(value).decode() for value in values(name)]
    number = lambda name: values(name)[0][0]
    tokens, merges = texts("tokenizer.ggml.tokens"), [tuple(merge.split(" ")) for merge in texts("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, merges))
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = [kind[0] for kind in values("tokenizer.ggml.token_type")]
    special = [token for token, kind in zip(tokens, kinds) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    [family], end = texts("general.architecture"), number("tokenizer.ggml.eos_token_id")
    shape = lambda name: number(f"{family}.{name}")
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    files = {
        "tokenizer_config.json": {"eos_token": tokens[end], "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"},
        "generation_config.json": {"eos_token_id": end},
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(tokens), "eos_token_id": end,
            "hidden_size": shape("embedding_length"), "intermediate_size": shape("feed_forward_length"),
            "num_hidden_layers": shape("block_count"), "num_attention_heads": shape("attention.head_count"),
            "num_key_value_heads": shape("attention.head_count_kv"), "max_position_embeddings": shape("context_length"),
        },
    }
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, value in files.items():
        (directory / name).write_text(json.dumps(value))


main(*sys.argv[1:])
