"""Finds models and reads their files (config, GGUF, safetensors, tokenizer, chat template), without torch."""
