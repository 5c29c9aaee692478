"""Clients of the engine servers that an adapter can use: vLLM, SGLang, llama.cpp and the OpenAI API."""
