#!/usr/bin/env python3
"""Writes the weights of a GGUF file as transformers has them, in f32, with the tokenizer: weights.py FILE DIRECTORY"""

import pathlib
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

source, target = pathlib.Path(sys.argv[1]), sys.argv[2]
AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype="float32").save_pretrained(target)
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
