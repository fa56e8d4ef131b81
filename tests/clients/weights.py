#!/usr/bin/env python3
"""Writes the weights of a GGUF file as transformers has them, in f32, with the tokenizer: weights.py FILE DIRECTORY"""

import pathlib
import sys

from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

source, target = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype="float32")
target.mkdir(parents=True)
# transformers writes no model that it has read from GGUF, though the weights are no longer quantised.
model.config.__dict__.pop("quantization_config", None)
model.config.save_pretrained(target)
tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
weights = {name: weight.contiguous() for name, weight in model.state_dict().items() if name not in tied}
save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
