"""Adapter: a node of the cluster whose engine is another server (vLLM, SGLang, llama.cpp or any OpenAI server)."""
